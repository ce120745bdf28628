"""Settings: who wins, which mistakes are found and in which words, and that nothing is without its reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lakefeed.ingest.config import PIPELINE_SECTIONS, SERVICE_SECTIONS, TABLES, Config, LoadedConfig, load_config
from lakefeed.settings import MIB, SECTIONS, SettingsError, setting_types

NO_ENVIRONMENT: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the lakefeed.toml of the current directory out of the tests."""
    monkeypatch.chdir(tmp_path)


def load(text: str = "", environ: dict[str, str] | None = None, **flags: object) -> LoadedConfig:
    path = Path("settings.toml")
    path.write_text(text, encoding="utf-8")
    return load_config(path, environ or NO_ENVIRONMENT, {f"server.{name}": value for name, value in flags.items()})


def complaint(text: str = "", environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(text, environ)
    return str(caught.value)


# -- who wins


def test_without_anything_the_defaults_hold():
    loaded = load_config(None, NO_ENVIRONMENT)
    assert loaded.config == Config()
    assert loaded.origins == {}


def test_file_beats_default_and_environment_beats_file_and_flag_beats_environment():
    text = '[server]\nhttp_port = 1\nws_port = 2\ndata_dir = "from-file"\n'
    environ = {"LAKEFEED_SERVER_WS_PORT": "3", "LAKEFEED_SERVER_DATA_DIR": "from-environment"}
    loaded = load(text, environ, data_dir="from-flag", host=None)
    server = loaded.config.server
    assert (server.host, server.http_port, server.ws_port, server.data_dir) == ("127.0.0.1", 1, 3, "from-flag")
    assert loaded.origins == {
        "server.http_port": "settings.toml",
        "server.ws_port": "LAKEFEED_SERVER_WS_PORT",
        "server.data_dir": "--data-dir",
    }


def test_file_of_the_usual_name_is_found_by_itself():
    Path("lakefeed.toml").write_text("[server]\nhttp_port = 9\n", encoding="utf-8")
    assert load_config(None, NO_ENVIRONMENT).config.server.http_port == 9


def test_variables_of_others_are_left_alone():
    assert load(environ={"HOME": "/root", "LAKE": "x"}).config == Config()


# -- mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nhttp_prot = 1", "unknown setting: key=server.http_prot in=settings.toml; did you mean"),
        ("[sever]\nhttp_port = 1", "unknown section: file=settings.toml section=sever; did you mean server?"),
        ("[sever]\n", "unknown section: file=settings.toml section=sever; did you mean server?"),
        ("[xyzzy]\nport = 1", "unknown section: file=settings.toml section=xyzzy; `lakefeed config` lists all"),
        (
            "http_port = 1",
            "setting outside a section: file=settings.toml key=http_port; did you mean server.http_port?",
        ),
        ("flush_max_bytes = 1", "did you mean writer.flush_max_bytes?"),
        ("[server.tls]\ncert = 'x'", "unknown setting: key=server.tls"),
        ("[pipeline.miror]\nmode = 'x'", "unknown section: file=settings.toml section=pipeline.miror; did you mean"),
        ("[pipeline.verification]\n", "unknown section: file=settings.toml section=pipeline.verification"),
        (
            "[pipeline.mirror]\nmodes = 'x'",
            "key=pipeline.mirror.modes in=settings.toml; did you mean pipeline.mirror.mode?",
        ),
        ("pipeline = 1", "setting outside a section: file=settings.toml key=pipeline"),
        ("[pipeline]\nmirror = 1", "setting outside a section: file=settings.toml key=pipeline.mirror"),
        ("[server]\n'http.port' = 1", "unknown setting: key=server.http.port"),
    ],
)
def test_unknown_key_in_the_file_is_an_error_that_names_the_nearest(text, words):
    assert words in complaint(text)


def test_unknown_key_in_the_environment_is_an_error_that_names_the_nearest():
    words = complaint(environ={"LAKEFEED_SERVER_HTTP_PROT": "1"})
    assert words == ("unknown setting: environment=LAKEFEED_SERVER_HTTP_PROT; did you mean LAKEFEED_SERVER_HTTP_PORT?")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nhttp_port = 'eighty'", "wrong value: key=server.http_port in=settings.toml expected=int"),
        ("[server]\nhttp_port = 1.5", "wrong type: key=server.http_port in=settings.toml expected=int got=float"),
        ("[server]\nhttp_port = true", "wrong type: key=server.http_port in=settings.toml expected=int got=bool"),
        ("[server]\nhost = 5", "wrong type: key=server.host in=settings.toml expected=text got=int"),
        ("[writer]\nkeep_before = 1", "wrong type: key=writer.keep_before in=settings.toml expected=bool got=int"),
        ("[writer]\nflush_max_age_s = 'soon'", "wrong type: key=writer.flush_max_age_s"),
        ("[writer]\nflush_max_age_s = true", "wrong type: key=writer.flush_max_age_s"),
    ],
)
def test_wrong_type_in_the_file_is_named(text, words):
    assert complaint(text).startswith(words)


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("LAKEFEED_SERVER_HTTP_PORT", "eighty", "int"),
        ("LAKEFEED_WRITER_FLUSH_MAX_AGE_S", "soon", "float"),
        ("LAKEFEED_WRITER_KEEP_BEFORE", "perhaps", "bool"),
        ("LAKEFEED_LOG_MAX_BYTES", "64MB", "int"),
        ("LAKEFEED_LOG_MAX_BYTES", "", "int"),
    ],
)
def test_wrong_value_in_the_environment_is_named_but_not_repeated(variable, value, kind):
    words = complaint(environ={variable: value})
    assert words.startswith("wrong value: key=")
    assert words.endswith(f"in={variable} expected={kind}")


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_file_that_cannot_be_read_is_named(path):
    with pytest.raises(SettingsError, match="cannot read the configuration: file="):
        load_config(Path(path), NO_ENVIRONMENT)


def test_file_that_is_no_toml_is_named_with_the_place():
    assert complaint("[server\n").startswith("not valid TOML: file=settings.toml error=")
    Path("settings.toml").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_config(Path("settings.toml"), NO_ENVIRONMENT)


# -- values


@pytest.mark.parametrize(
    ("text", "expected"),
    [("67108864", 64 * MIB), ("64MiB", 64 * MIB), ("64 MiB", 64 * MIB), ("65536KiB", 64 * MIB), (" 64MiB ", 64 * MIB)],
)
def test_bytes_may_have_a_unit_in_file_and_environment(text, expected):
    assert load(f"[writer]\nflush_max_bytes = '{text}'").config.writer.flush_max_bytes == expected
    assert load(environ={"LAKEFEED_WRITER_FLUSH_MAX_BYTES": text}).config.writer.flush_max_bytes == expected


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("ON", True), ("1", True), ("no", False), ("0", False)])
def test_switches_are_read_from_the_environment(text, expected):
    assert load(environ={"LAKEFEED_WRITER_KEEP_BEFORE": text}).config.writer.keep_before is expected


def test_whole_numbers_do_for_seconds():
    assert load("[writer]\nflush_max_age_s = 5").config.writer.flush_max_age_s == 5.0


# -- checks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nhttp_port = 65536", "server.http_port must be between 0 and 65535: 65536"),
        ("[server]\nws_port = -1", "server.ws_port must be between 0 and 65535"),
        ("[server]\nhost = ''", "server.host must not be empty"),
        ("[server]\nshutdown_deadline_s = -1", "server.shutdown_deadline_s must be at least 0: -1.0"),
        ("[server]\nstalled_after_s = 0", "server.stalled_after_s must be above 0: 0.0"),
        ("[ingest]\nqueue_max_bytes = 0", "ingest.queue_max_bytes must be at least 1: 0"),
        ("[ingest]\nevent_max_bytes = '8MiB'", "ingest.event_max_bytes must not be above frame_max_bytes"),
        ("[ingest]\nmemory_max_bytes = '8MiB'", "ingest.memory_max_bytes must be at least 10485760, for two frames"),
        ("[ingest]\nmessage_rate_per_s = -1", "ingest.message_rate_per_s must be at least 0: -1.0"),
        ("[ingest]\nconnections_max = 0", "ingest.connections_max must be at least 1: 0"),
        ("[ingest]\ntrusted_proxies = 'proxy'", "ingest.trusted_proxies must be addresses and networks: "),
        ("[log]\nmax_bytes = '64MiB'", "log.max_bytes must hold at least two segments"),
        ("[writer]\nflush_max_age_s = nan", "writer.flush_max_age_s must be above 0: nan"),
        ("[writer]\nbuffer_max_bytes = '255MiB'", "writer.buffer_max_bytes must be at least 4 times flush_max_bytes; "),
        ("[writer]\nflush_max_bytes = '65MiB'", "writer.buffer_max_bytes must be at least 4 times flush_max_bytes; "),
        ("[writer]\ntables_max = 0", "writer.tables_max must be at least 1: 0"),
        ("[writer]\nparquet_compression = 'zip'", "writer.parquet_compression must be one of zstd"),
        ("[storage]\npart_bytes = 1", "storage.part_bytes must be at least 5 MiB"),
        (
            "[log]\nsegment_max_bytes = '8MiB'",
            "log.segment_max_bytes must be at least four times ingest.frame_max_bytes",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(text, words):
    assert complaint(text).startswith(words)


# -- every setting


ALL_SECTIONS = {**SERVICE_SECTIONS, **PIPELINE_SECTIONS}
SERVICE_KEYS = [f"{section}.{name}" for section, kind in SERVICE_SECTIONS.items() for name in setting_types(kind)]


def test_every_section_is_known_to_every_command():
    assert sorted((*ALL_SECTIONS, TABLES)) == sorted(SECTIONS)
    assert tuple(SERVICE_SECTIONS) == tuple(item.name for item in dataclasses.fields(Config) if item.name != TABLES)


@pytest.mark.parametrize("section", ALL_SECTIONS)
def test_every_setting_has_a_default_and_one_sentence_or_more_on_what_it_does(section):
    for item in dataclasses.fields(ALL_SECTIONS[section]):
        assert re.fullmatch(r"[A-Z`].*[.]", item.metadata["help"]), item.name
    assert ALL_SECTIONS[section]()
    assert ALL_SECTIONS[section].__doc__


@pytest.mark.parametrize("key", SERVICE_KEYS)
def test_every_setting_can_come_from_the_environment(key):
    section, name = key.split(".")
    default = getattr(getattr(Config(), section), name)
    variable = f"LAKEFEED_{section}_{name}".upper()
    loaded = load(environ={variable: ",".join(default) if isinstance(default, tuple) else str(default)})
    assert loaded.origins == {key: variable}
    assert loaded.config == Config()


@pytest.mark.parametrize("key", SERVICE_KEYS)
def test_every_setting_can_come_from_the_file(key):
    section, name = key.split(".")
    default = getattr(getattr(Config(), section), name)
    value = f"'{default}'" if isinstance(default, str) else str(default).lower().replace("()", "[]")
    loaded = load(f"[{section}]\n{name} = {value}\n")
    assert loaded.origins == {key: "settings.toml"}
    assert loaded.config == Config()


def test_default_listens_on_loopback_only():
    assert Config().server.host == "127.0.0.1"


def test_list_of_texts_comes_from_a_list_or_by_commas():
    tokens = ("first-of-the-tokens", "second-of-the-tokens")
    assert load(f"[auth]\ntokens = {list(tokens)}\n").config.auth.tokens == tokens
    assert load(environ={"LAKEFEED_AUTH_TOKENS": ", ".join(tokens)}).config.auth.tokens == tokens
    assert (
        complaint("[auth]\ntokens = 'one'")
        == "wrong type: key=auth.tokens in=settings.toml expected=list of text got=str"
    )
    assert "key=auth.tokens" in complaint("[auth]\ntokens = [1]")


def test_tokens_never_show_not_even_in_complaints_about_them():
    assert "first-of" not in repr(load("[auth]\ntokens = ['first-of-the-tokens']\n"))
    text = complaint("[auth]\ntokens = ['first-of-the-tokens', 'with a blank in it']")
    assert text.startswith("auth.tokens: a token must be letters, digits")
    assert "blank" not in text
    assert (
        complaint("[auth]\ntokens = ['short']")
        == "auth.tokens: a token must have 16 to 4096 characters: number=1 has=5"
    )


def test_token_of_the_command_line_is_no_setting_of_the_service():
    assert load(environ={"LAKEFEED_TOKEN": "first-of-the-tokens"}).config == Config()


def test_secrets_are_marked_and_do_not_show_when_settings_are_printed():
    secrets = [item.name for item in dataclasses.fields(SERVICE_SECTIONS["storage"]) if item.metadata.get("secret")]
    assert secrets == ["s3_secret_access_key", "s3_session_token", "azure_account_key"]
    environ = {f"LAKEFEED_STORAGE_{name.upper()}": "hush" for name in secrets}
    assert "hush" not in repr(load(environ=environ | {"LAKEFEED_STORAGE_S3_ACCESS_KEY_ID": "known"}))
