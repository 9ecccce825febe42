"""Run requests: the scheduler, the budget for caches, and the heap."""
