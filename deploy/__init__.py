"""The `sluice` command, the launcher, the demo model, and files for production."""
