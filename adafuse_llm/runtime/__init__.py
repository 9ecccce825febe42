"""Execution of requests.

scheduler  decides which queries to evaluate together, and when
job        one job: its computation, and how it ends
budget     decides which requests fit into the memory for caches
"""
