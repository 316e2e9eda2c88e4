"""llama.cpp's own routes: https://github.com/ggml-org/llama.cpp/tree/master/tools/server."""
