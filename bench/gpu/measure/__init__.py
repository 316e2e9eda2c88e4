"""Measurements: each module measures one or more sections of `sluice bench gpu`."""
