"""Turns chat messages into a prompt, with tools, images, samplers and thinking budgets."""
