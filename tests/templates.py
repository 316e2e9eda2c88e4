"""Short chat templates with tools and reasoning, with the tags and message layouts of model families."""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each call, return within <tool_call></tool_call> tags:\\n' }}
    {{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.first and tools %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format ' }}
        {{- '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
        {{- message.content + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
{#- what calls a built-in tool begins with: <|python_tag|> #}
"""

MISTRAL = """\
{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('no such id') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Shows and refuses the same messages as gpt-oss's template; types of parameters are simplified.
HARMONY = """\
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n' }}
{{- 'Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' + effort + '\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{%- if tools %}{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}
{{- '<|end|>' }}
{%- set instructed = messages[0].role in ['system', 'developer'] %}
{%- set turns = messages[1:] if instructed else messages %}
{%- if instructed or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if instructed %}{{- '# Instructions\\n\\n' + messages[0].content }}{% endif %}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools | map(attribute='function') %}
            {{- '// ' + tool.description + '\\ntype ' + tool.name + ' = (' }}
            {%- if tool.parameters.properties %}
                {{- '_: {\\n' }}
                {%- for name, schema in tool.parameters.properties.items() %}
                    {{- name + ('' if name in tool.parameters.required or [] else '?') + ': ' }}
                    {{- schema.type | default('any') + ',\\n' }}
                {%- endfor %}
                {{- '}' }}
            {%- endif %}
            {{- ') => any;\\n\\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set seen = namespace(name=none, answer=-1) %}
{%- for turn in turns %}
    {%- if turn.role == 'assistant' and 'tool_calls' not in turn %}{% set seen.answer = loop.index0 %}{% endif %}
{%- endfor %}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}
        {{- '<|start|>user<|message|>' + turn.content + '<|end|>' }}
    {%- elif turn.role == 'tool' %}
        {%- if seen.name is none %}{{- raise_exception('a tool message without a call') }}{% endif %}
        {{- '<|start|>functions.' + seen.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- turn.content | tojson + '<|end|>' }}
    {%- elif turn.role == 'assistant' and 'tool_calls' in turn %}
        {%- if turn.content and turn.thinking %}{{- raise_exception('both content and thinking') }}{% endif %}
        {%- if (turn.content or turn.thinking) and loop.index0 > seen.answer %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (turn.content or turn.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set seen.name = turn.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + seen.name + '<|channel|>commentary json<|message|>' }}
        {{- turn.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif turn.role == 'assistant' %}
        {%- set training = loop.last and not add_generation_prompt %}
        {%- if training and 'thinking' in turn %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + turn.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + turn.content }}
        {{- '<|return|>' if training else '<|end|>' }}
        {%- set seen.name = none %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

# Like Qwen3.5's template: the prompt opens the reasoning, and calls have their parameters between tags.
QWEN35 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nTo call a function, reply as follows:\\n\\n<tool_call>\\n<function=NAME>\\n' }}
    {{- '<parameter=KEY>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n\\n' if loop.first and message.content else '\\n' if not loop.first else '') }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Like GLM-4.5's template: a call is a name and pairs of keys and values.
GLM = """\
[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n\\n<tools>\\n' }}
    {%- for tool in tools %}{{- tool | tojson(ensure_ascii=False) + '\\n' }}{% endfor %}
    {{- '</tools>\\n\\n<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n' }}
    {{- '<arg_value>{arg-value-1}</arg_value>\\n...\\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>\\n' + message.content }}
        {%- if enable_thinking is defined and not enable_thinking %}{{- '/nothink' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (message.reasoning_content or '').strip() + '</think>' }}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value | tojson(ensure_ascii=False) if value is not string else value }}
                {{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|system|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{% endif %}
{%- endif %}
"""

# A template without tools, which refuses two consecutive messages of the same role.
PLAIN = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
