"""Find the members and options that answer a user's questions best, and run public benchmarks.

tuning      search for members and options, and test them on held-out questions
comparison  compare two systems on the same questions
confidence  fit and measure a calibration of confidences
decisions   fit and measure a calibration of typed questions
exact_match compare answers with accepted answers
lm_eval     make the engine a model of lm-evaluation-harness
files       read test sets, write results, and resume interrupted runs
parallel    answer several questions at the same time
"""
