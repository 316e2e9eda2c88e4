"""`sluice bench workloads`: runs workloads against one server or several modes, and reports them."""
