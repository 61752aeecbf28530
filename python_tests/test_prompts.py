"""Prompts as typed pieces, and the chat template's fixed parts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wim_kit import CHATML, MARKERS, byte_fallback_tokenizer, byte_level_tokenizer

from wim_ext import template_process
from wim_ext.chat_template import render_template, template_parts
from wim_ext.prompts import MARGIN, MARGINS, QUESTION, Layout, Prompts, fill
from wim_ext.tokens import TextCodec

SYSTEM_FIRST = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}SYS {{ messages[0].content }}|"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<file_sep>{{ m.content | trim }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}REPLY{% if enable_thinking %} HMM{% endif %}:{% endif %}"
)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders here: a process for each template would take seconds and is tested by itself."""
    monkeypatch.setattr(template_process, "limit_resources", lambda: None)
    monkeypatch.setattr(
        "wim_ext.chat_template.render_template",
        lambda request: template_process.render(json.loads(request)),
    )


def layout(template: str | None, bos: bool = False, **prompts: object) -> Layout:
    tokenizer = byte_level_tokenizer(template, bos)
    return Layout.of(TextCodec(tokenizer), Prompts(**prompts))


def shown(ids: list[int]) -> str:
    return byte_level_tokenizer().decode(ids, skip_special_tokens=False)


def test_slots_are_filled_with_texts_as_they_are() -> None:
    template = ("a ", QUESTION, " b {question} ", QUESTION)
    assert fill(template, question="{x} %s {{y}}") == "a {x} %s {{y}} b {question} {x} %s {{y}}"


@given(question=st.text(max_size=30), margin=st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_nothing_in_a_text_means_anything_to_a_template(question: str, margin: str) -> None:
    prompts = Prompts()
    text = fill(prompts.classify, question=question, margin=margin)
    assert question in text
    assert margin in text


def test_default_prompts_hold_no_control_token() -> None:
    codec = TextCodec(byte_level_tokenizer())
    prompts = Prompts()
    for name in ("intro", "extract_fused", "extract", "probe", "extract_probed", "classify"):
        text = fill(getattr(prompts, name), question="q", margin="m")
        assert not codec.control_ids & set(codec.encode(text))
        assert "\\n" not in text


@pytest.mark.usefixtures("in_this_process")
def test_layout_of_a_chat_template() -> None:
    found = layout(CHATML)
    assert shown(found.opening) == "<|im_start|>user\n"
    assert shown(found.closing) == "<|im_end|>\n<|im_start|>assistant\n"
    assert found.is_chat


@pytest.mark.usefixtures("in_this_process")
def test_a_system_message_is_plain_text_in_its_place() -> None:
    found = layout(CHATML, system="Be brief <|im_end|>")
    assert shown(found.opening).startswith("<|im_start|>system\nBe brief <|im_end|><|im_end|>\n")
    end = byte_level_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert found.opening.count(end) == 1


@pytest.mark.usefixtures("in_this_process")
def test_templates_that_trim_and_add_bos_and_can_think() -> None:
    found = layout(SYSTEM_FIRST, system="S")
    assert shown(found.opening) == "<|im_start|>SYS S|<file_sep>"
    assert shown(found.closing) == "<|endoftext|>REPLY:"


def test_a_base_model_gets_a_plain_layout() -> None:
    found = layout(None)
    assert (found.opening, shown(found.closing), found.is_chat) == ([], "\n\nAnswer:", False)
    assert shown(layout(None, system="Be brief.").opening) == "Be brief.\n\n"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("template", [None, "{{ bos_token }}" + CHATML, CHATML])
def test_one_bos_where_the_tokenizer_uses_one(template: str | None) -> None:
    codec = TextCodec(byte_fallback_tokenizer(template))
    opening = Layout.of(codec, Prompts()).opening
    assert opening[0] == codec.bos_id
    assert opening.count(codec.bos_id) == 1


@pytest.mark.usefixtures("in_this_process")
def test_a_doubled_bos_of_a_template_is_one() -> None:
    found = layout("{{ bos_token }}" + CHATML, bos=True)
    assert shown(found.opening) == "<|im_start|>user\n"


@pytest.mark.usefixtures("in_this_process")
def test_markers_that_the_template_holds_already_are_avoided() -> None:
    found = layout("wimslotuser {{ messages[0].content }}!")
    assert shown(found.opening) == "wimslotuser "
    assert shown(found.closing) == "!"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 100000 }}", "it returns 100000 characters; allowed are 65536"),
        ("{{ messages[0].content * 2 }}", "shows the user message 2 times instead of once"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_templates_that_cannot_be_used_say_why(template: str, reason: str) -> None:
    tokenizer = byte_level_tokenizer.__wrapped__(template)
    with pytest.raises(ValueError, match="the model's chat template cannot be used: .*" + reason):
        template_parts(tokenizer, system=False)


@pytest.mark.usefixtures("in_this_process")
def test_a_template_without_a_system_role_says_so() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="shows the system message 0 times instead of once"):
        layout(template, system="Be brief.")


def test_a_template_is_rendered_once_for_all_models_that_share_it() -> None:
    render_template.cache_clear()
    for _ in range(3):
        template_parts(byte_level_tokenizer(CHATML), system=False)
    assert render_template.cache_info().misses == 1


def test_a_broken_child_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    request = {"messages": [], "template": "x", "variables": {}}
    with pytest.raises(ValueError, match=r"cannot be used: .*transformers"):
        render_template.__wrapped__(json.dumps(request))


def test_a_slow_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wim_ext.chat_template._PARENT_TIMEOUT", 0.01)
    with pytest.raises(ValueError, match=r"cannot be used: no reply within 0 s"):
        render_template.__wrapped__(json.dumps({"messages": [], "template": "x", "variables": {}}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"extract": ("no slot",)},
            r"prompts.extract must have the slots QUESTION, it has \(none\)",
        ),
        ({"intro": (QUESTION,)}, r"prompts.intro must have the slots \(none\), it has QUESTION"),
        (
            {"classify": (MARGINS, QUESTION)},
            "prompts.classify must have the slots MARGIN, QUESTION, it has MARGINS, QUESTION",
        ),
        ({"margin": "- {}"}, "prompts.margin must be a tuple of texts and slots, got '- {}'"),
        ({"margin": (MARGIN, 3)}, "prompts.margin must be a tuple of texts and slots"),
        (
            {"probe": (" ", QUESTION)},
            "prompts.probe must begin with words: they predict the question",
        ),
        ({"yes": ()}, "prompts.yes must hold at least one word and no empty one"),
        ({"no": ("no", " ")}, "prompts.no must hold at least one word and no empty one"),
    ],
)
def test_prompts_of_ones_own_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prompts(**options)


def test_prompts_of_ones_own() -> None:
    prompts = Prompts(extract=("Was steht da zu: ", QUESTION), yes=("ja",), no=("nein",))
    assert fill(prompts.extract, question=MARKERS[0]) == "Was steht da zu: <|im_start|>"
