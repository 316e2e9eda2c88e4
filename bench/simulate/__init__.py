"""Runs the scheduler and the page pool in virtual time: `sluice simulate`."""
