"""Code shared by frontends, workers and the launcher. It imports none of them."""
