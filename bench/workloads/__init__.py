"""`sluice bench workloads`: runs workloads against one server or several modes, and reports them.

measure     starts servers, sends the workloads, collects records
kills       random workers killed while many answers stream
report      the results as a page of HTML
plots       pictures of the results
"""
