"""How requests run: the scheduler, the cache budget, and heap trimming."""
