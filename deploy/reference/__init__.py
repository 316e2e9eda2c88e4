"""Tables in the documentation that are generated from the code: `python -m deploy.reference`.

tables              the tables
shapes              the documented shapes of JSON values
"""
