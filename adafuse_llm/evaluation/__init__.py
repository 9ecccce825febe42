"""Does fusing pay? Tasks, strict metrics, intervals and paired tests over recorded answers.

    metrics     how an answer is compared with the accepted ones
    statistics  intervals and paired tests, seeded
    files       test sets in, results out, resumable
    tasks       prompts, options and metrics of each benchmark
    runner      questions to an engine, many at a time; what the results say
    lm_eval     the engine as a model of lm-evaluation-harness

Scores are percentages (0 to 100) throughout.
"""
