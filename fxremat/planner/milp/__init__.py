"""Plans by integer programmes on HiGHS: Checkmate's, and its relaxation over a few moments."""
