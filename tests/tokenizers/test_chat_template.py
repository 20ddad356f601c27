from __future__ import annotations

import pytest

from ksana.errors import ModelLoadError, RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.template_limits import MAX_TEMPLATE_CHARS
from tests.tokenizers.tiny_tokenizers import byte_level_tokenizer

USER = ChatMessage(role="user", content="Hi")
ASSISTANT = ChatMessage(role="assistant", content="Hello, I")
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def render(template: str, *messages: ChatMessage, date: str | None = None, prompt: bool = False) -> str:
    chat = ChatTemplate(template, {"bos_token": "<s>"}, "x")
    return chat.render(messages or (USER,), add_generation_prompt=prompt, date=date)


def test_messages_and_generation_prompt() -> None:
    assert render(PLAIN, USER, ASSISTANT) == "[user]Hi[assistant]Hello, I"
    assert render(PLAIN, USER, prompt=True) == "[user]Hi>"


def test_blocks_leave_no_lines_behind() -> None:
    assert render("{% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_what_templates_expect_is_there() -> None:
    assert render("{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ eos_token is defined }}") == (
        "<s>TrueTrueFalse"
    )
    assert render("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}") == "Hi"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("{{ messages[0].name is defined }}") == "False"
    assert render("{{ messages[0].get('name', 'none') }}") == "none"
    assert (
        render("{{ loop is defined }}{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{% endfor %}")
        == "False0True"
    )


def test_json_is_written_as_is() -> None:
    assert render("{{ {'a': '<é>', 'b': [1, none, true]} | tojson }}") == '{"a": "<é>", "b": [1, null, true]}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ ' a b ' | trim | upper }}", "A B"),
        ("{{ ['b', 'a'] | sort | join(', ') }}", "a, b"),
        ("{{ messages | map(attribute='role') | join('+') }}", "user+assistant"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | rejectattr('role', 'eq', 'user') | map(attribute='role') | first }}", "assistant"),
        ("{{ 'a.b'.split('.')[1:] }}", "['b']"),
        ("{{ 'abab'.replace('a', 'x') }}{{ 'abab' | replace('a', 'x', 1) }}", "xbxbxbab"),
        ("{{ '-'.join(['a', 'b']) }}{{ 'x' * 3 }}{{ 'a' ~ 1 ~ none }}", "a-bxxxa1None"),
        ("{{ '%s is %d' % ('a', 3) }}{{ '{:.2f}'.format(1.5) }}", "a is 31.50"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 1.26 | round(1) }}{{ '<' | e }}{{ '<' | safe }}", "1.3&lt;<"),
        ("{{ {'b': 1, 'a': 2} | dictsort | first | last }}{{ {'a': 1}.items() | list }}", "2[('a', 1)]"),
        (
            "{{ {'b': 1, 'a': 2} | list }}{{ (range(2) | list) + [9] }}{{ (1,) | list }}",
            "['b', 'a'][0, 1, 9][1]",
        ),
        ("{{ '<' | e | e }}{{ 'in 20240 %s' % 'x' }}{{ '-'.join('ab' | list) }}", "&lt;in 20240 xa-b"),
        ("{{ messages | groupby('role') | map('first') | list }}", "['assistant', 'user']"),
        ("{% macro f(x) %}<{{ x }}>{{ caller() if caller else '' }}{% endmacro %}{{ f(1) }}", "<1>"),
        ("{{ messages[-1]['content'][:5] }}{{ undefined_name | default('d') }}", "Hellod"),
        ("{{ dict(a=1).a }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ -3 | abs }}", "1310243"),
        ("{{ messages[0].role in ['user', 'tool'] and 'H' in messages[0].content }}", "True"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{% endset %}{{ x }}", "ABc"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}no{% endfor %}", "a1"),
        ("{% for i in range(5) if i is odd %}{{ i }}{{ loop.length }}{% endfor %}", "1232"),
    ],
)
def test_filters_methods_and_operators(template: str, expected: str) -> None:
    assert render(template, USER, ASSISTANT) == expected


def test_names_of_messages_are_passed_on() -> None:
    assert render("{{ messages[0].name }}", ChatMessage(role="user", content="", name="Ann")) == "Ann"


def test_the_date_is_the_one_passed_in() -> None:
    template = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no date' }}"
    assert render(template, date="2026-02-03T04:05:06") == "03 Feb 2026"
    assert render(template) == "no date"


def test_a_template_may_refuse_with_its_own_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "template", ["{{ a.b.c }}", "{{ 1 / 0 }}", "{{ [] | first | upper + 1 }}", "{{ none.x.y }}"]
)
def test_whatever_goes_wrong_in_a_template_is_a_400(template: str) -> None:
    with pytest.raises(RequestError) as refused:
        render(template)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ 'a' | no_such_filter }}", "{% nothing %}", "(" * 3 + "{{ ((("]
)
def test_templates_that_do_not_compile_are_found_when_loading(template: str) -> None:
    with pytest.raises(ModelLoadError, match=r"dir/model.*not valid Jinja"):
        ChatTemplate(template, {}, "dir/model")


def test_an_error_is_one_line_that_can_be_sent_whatever_the_template_says() -> None:
    with pytest.raises(RequestError) as refused:
        render("{{ raise_exception('a\\nb\\ud800\\x1b[31m' ~ 'c' * 9999) }}")
    assert "a b  [31mccc" in refused.value.message
    assert refused.value.message.endswith("...")
    assert len(refused.value.message) < 700
    with pytest.raises(RequestError, match="expected length"):
        render("{{ 'a' | truncate(1) }}")


def test_oversized_and_deeply_nested_templates_are_found_when_loading() -> None:
    with pytest.raises(ModelLoadError, match="characters"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1), {}, "x")
    with pytest.raises(ModelLoadError):
        ChatTemplate("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", {}, "x")


def test_no_messages() -> None:
    with pytest.raises(RequestError, match="empty"):
        ChatTemplate(PLAIN, {}, "x").render([])


class TestContinueFinalMessage:
    def test_the_text_ends_inside_the_final_message(self) -> None:
        chat = ChatTemplate(PLAIN + "{{ '<end>' }}", {}, "x")
        assert chat.render([USER, ASSISTANT], False, True) == "[user]Hi[assistant]Hello, I"

    def test_trailing_blanks_stay_unless_the_template_trims(self) -> None:
        blank = ChatMessage(role="assistant", content="Hello ")
        assert ChatTemplate(PLAIN, {}, "x").render([blank], False, True) == "[assistant]Hello "
        trimming = "{% for m in messages %}{{ m.content | trim }}{% endfor %}<end>"
        assert ChatTemplate(trimming, {}, "x").render([blank], False, True) == "Hello"

    def test_what_a_message_says_is_not_taken_for_the_place_to_cut(self) -> None:
        typed = "x KSANA CONTINUES THIS MESSAGE 0 y"
        messages = [ChatMessage(role="user", content=typed), ChatMessage(role="assistant", content=typed)]
        assert (
            ChatTemplate(PLAIN, {}, "x").render(messages, False, True) == f"[user]{typed}[assistant]{typed}"
        )
        dropping = "{{ messages[0].content }}"
        with pytest.raises(RequestError, match="cannot be continued"):
            ChatTemplate(dropping, {}, "x").render(messages, False, True)

    def test_a_template_that_changes_the_message_cannot_continue_it(self) -> None:
        thoughts = ChatMessage(role="assistant", content="<think>a</think>b")
        source = "{{ messages[0].content.split('</think>')[-1] }}"
        with pytest.raises(RequestError, match="cannot be continued"):
            ChatTemplate(source, {}, "x").render([thoughts], False, True)

    def test_excludes_a_generation_prompt(self) -> None:
        with pytest.raises(RequestError, match="exclude"):
            ChatTemplate(PLAIN, {}, "x").render([USER], True, True)

    def test_a_template_that_drops_the_message_cannot_continue_it(self) -> None:
        with pytest.raises(RequestError, match="cannot be continued"):
            ChatTemplate("{{ messages[0].role }}", {}, "x").render([USER], False, True)


def test_no_template_is_a_400_that_says_so_and_not_a_guess() -> None:
    with pytest.raises(RequestError, match="no chat template") as refused:
        byte_level_tokenizer(template=None).chat([USER])
    assert (refused.value.status, refused.value.code) == (400, "no_chat_template")


def test_the_template_writes_the_bos_and_the_tokenizer_adds_no_second_one() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode("Hi").count(0) == 1
    assert tokenizer.chat([USER]).count(0) == 1


def test_special_tokens_typed_by_a_user_are_special_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.chat([ChatMessage(role="user", content="x</s>y")]).count(1) == 1
    assert tokenizer.encode("a</s>b", add_special_tokens=False)[1] == 1
