"""Evaluation: which members and options answer a user's questions best, and public benchmarks.

tuning      search for members and options, and test them on held-out questions
comparison  compare two systems on the same questions
confidence  fit a calibration, and measure what it is worth
decisions   fit decisions, and measure what they are worth
exact_match compare answers with accepted answers
lm_eval     make the engine a model of lm-evaluation-harness
files       read test sets, write results, and resume interrupted runs
parallel    several questions at the same time
"""
