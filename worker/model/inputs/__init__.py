"""The input of a forward, as a table of columns.

forward_inputs      the input of a forward, as a table of its columns
step_columns        what a column is
columns_in_c        the columns as the C library reads them
"""
