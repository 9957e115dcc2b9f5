"""How long an op takes: device specs, the roofline, measured times."""
