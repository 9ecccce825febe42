"""Execution of requests.

scheduler  decides which queries to evaluate together, and when
job        one job: its computation, and how it ends
waiting    the jobs that wait until they can start
budget     decides which requests fit into the memory for caches
heap       returns freed memory to the operating system
"""
