"""Execution of requests: the scheduler, the cache budget, and heap trimming."""
