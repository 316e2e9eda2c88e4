"""Takes requests from the wire, has steps computed on the device, and sends the results back."""
