"""The order in which tiles of keys are launched and add to dQ: turns, launch orders, and a model of waits."""
