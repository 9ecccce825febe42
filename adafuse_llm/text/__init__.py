"""Text processing without models.

words         where words begin and end
codec         text to tokens and back, as a continuation of earlier tokens
opening       the beginning of a response: spaces of the prompt, whitespace of a reply
stops         stop sequences, and the text of a response so far
conversation  messages, tools and calls, and the forms in which members read them
templates     each member's chat template
reasoning     reasoning in replies
reply_start   where a reply begins: in reasoning, or at the answer
"""
