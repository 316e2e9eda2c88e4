"""Tables in the documentation that are generated from the code: `python -m deploy.generate.docs`.

tables              all tables
api                 the tables of docs/api.md
field_table         the tables of docs/fields.md
markdown            a table in Markdown
shapes              the documented shapes of JSON values
"""
