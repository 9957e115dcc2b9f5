"""Plans by integer programmes on HiGHS: relaxations over a few program points."""
