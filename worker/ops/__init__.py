"""The operations of a decoder. The modules of this folder import nothing from other folders of the worker."""
