"""Local search over schedules: eviction, ruin and repair, the least peak."""
