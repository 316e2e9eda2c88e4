"""The quality of weight formats on a real model and real English: `python -m bench.real`."""
