"""SGLang's own routes: https://docs.sglang.io/basic_usage/native_api.html."""
