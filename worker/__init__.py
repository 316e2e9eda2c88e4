"""A worker process: it schedules, computes and samples on one device."""
