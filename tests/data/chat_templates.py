"""Chat templates that do what those of well-known models do, written anew and without the parts
that no test reaches.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks, a question's spaces inside of the prompt
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}"
    "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Tools stand in the first question, the day in the system message
LLAMA3 = """\
{%- set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{{- bos_token + '<|start|>system<|end|>\\n\\nToday: ' + day + '<|eot|>' }}
{%- if tools is not none %}
    {{- '<|start|>user<|end|>\\n\\n' + tools | tojson(indent=4) }}
    {{- messages[0]['content'] | trim + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}"""
# Thinking only after the last question, and an empty one if there is none
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_question = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set thinking = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and (loop.last or thinking) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thinking + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The system message and the tools stand before the last question: of a prompt the system message
NEMO = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST]' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST]' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' + message.tool_calls | tojson + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
# A loop over later messages inside of the loop, macros, another end for the last answer, a day
GPT_OSS = """\
{%- macro header(role) -%}{{- '<|start|>' + role -}}{%- endmacro -%}
{{- header('system') + '<|message|>Today: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set later = namespace(answered=false) %}
        {%- for other in messages[loop.index:] %}
            {%- if other.role == 'assistant' and not other.tool_calls %}
                {%- set later.answered = true %}
            {%- endif %}
        {%- endfor %}
        {%- if message.thinking and not later.answered %}
            {{- header('assistant') + '<|channel|>analysis<|message|>' + message.thinking }}
            {{- '<|end|>' }}
        {%- endif %}
        {{- header('assistant') + ' to=' + message.tool_calls[0].function.name }}
        {{- '<|channel|>commentary<|message|>' }}
        {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and message.thinking %}
            {{- header('assistant') + '<|channel|>analysis<|message|>' + message.thinking }}
            {{- '<|end|>' }}
        {%- endif %}
        {{- header('assistant') + '<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- header(message.role) + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
# A prompt that ends in a space, which the first token of an answer may take
SPACE = (
    "{% for m in messages %}{{ 'Question' if m.role == 'user' else 'Answer' }}: {{ m.content }}"
    "\n{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE in which " a" and " rose" are tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a rose is a rose user assistant system"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def write(folder: Path, template: Any) -> None:
    """Write the settings of the tokenizer in `folder`, with a chat template."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
