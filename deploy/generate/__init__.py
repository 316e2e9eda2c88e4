"""Tables in the documentation that are generated from the code: `python -m deploy.generate.docs`."""
