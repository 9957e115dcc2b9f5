"""From the joint graph that torch gives to the two graphs that Inductor gets."""
