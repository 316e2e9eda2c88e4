"""Sluice on a Ray cluster; nothing else imports Ray.

serve               the application for Ray Serve
"""
