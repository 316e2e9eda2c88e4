"""`sluice bench gpu --call NAME --results DIR`: everything about a GPU, in three commands of nine minutes."""
