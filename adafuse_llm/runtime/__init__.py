"""Execution of requests.

scheduler  decides which queries to evaluate together, and when
budget     decides which requests fit into the memory for caches
heap       returns freed memory to the operating system
"""
