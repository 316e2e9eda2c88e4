"""The input of a forward, as a table of columns.

forward_inputs      the declarations of all columns
step_columns        what a declaration of a column says
columns_in_c        the columns as the C library reads them
"""
