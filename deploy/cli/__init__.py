"""Every `sluice` command."""
