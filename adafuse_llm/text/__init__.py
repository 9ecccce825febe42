"""Text processing without models.

words  where words begin and end
codec  text to tokens and back, as a continuation of earlier tokens
chat   messages, and each member's chat template
stops  stop sequences, and the text of a response so far
"""
