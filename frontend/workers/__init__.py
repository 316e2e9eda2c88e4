"""The worker pool, as one frontend sees it."""
