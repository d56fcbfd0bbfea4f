"""Keys: where they come from, what they allow, and that none is shown."""

import pytest

from inlay.errors import ConfigError
from inlay.serve.keys import Keys, client_of, key_in
from inlay.serve.server import check_bind

ONE, TWO = "one-key-of-sixteen-letters", "two-key-of-sixteen-letters"


def test_a_file_and_the_environment_give_keys(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text(f"# people\n{ONE}\n\nadmin {TWO}\n")
    keys = Keys.read(file, {"INLAY_SERVE_KEYS": f"{ONE}-env, {TWO}-env"})
    assert keys.role_of(ONE) == "user"
    assert keys.role_of(TWO) == "admin"
    assert keys.role_of(f"{TWO}-env") == "user"
    assert keys.role_of(ONE[:-1]) is None
    assert keys.role_of(None) is None
    assert ONE not in repr(keys)
    assert ONE not in str(vars(keys))


@pytest.mark.parametrize(
    ("text", "says"), [("short", "shorter than 16"), ("", "holds no key"), ("a b c d e f g h i j", "more words")]
)
def test_files_without_good_keys_are_refused(tmp_path, text, says):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=says):
        Keys.read(tmp_path / "keys", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.read(tmp_path / "nothing", {})


def test_every_key_is_compared_in_constant_time(monkeypatch):
    """Also after one that fits."""
    import hmac

    seen = []
    real = hmac.compare_digest
    monkeypatch.setattr("inlay.serve.keys.hmac.compare_digest", lambda a, b: seen.append(1) or real(a, b))
    Keys.of([ONE, TWO], [f"{ONE}3"]).role_of(ONE)
    assert len(seen) == 3


def test_a_key_is_found_in_headers():
    import base64

    assert key_in({"authorization": f"Bearer {ONE}"}) == ONE
    assert key_in({"authorization": "Basic " + base64.b64encode(f"me:{ONE}".encode()).decode()}) == ONE
    assert key_in({"x-api-key": TWO}) == TWO
    assert key_in({}) is None
    assert client_of(ONE, "1.2.3.4") == client_of(ONE, "5.6.7.8") != client_of(None, "1.2.3.4")
    assert ONE not in client_of(ONE, "")


def test_another_address_than_this_machine_needs_a_key():
    assert check_bind("127.0.0.1:8000", Keys(), False) == ("127.0.0.1", 8000)
    assert check_bind("[::1]:80", Keys(), False) == ("::1", 80)
    assert check_bind("0.0.0.0:8000", Keys.of([ONE]), False) == ("0.0.0.0", 8000)  # noqa: S104
    assert check_bind("0.0.0.0:8000", Keys(), True)
    for bind in ("0.0.0.0:8000", "[::]:8000", "192.168.1.7:1", "example.org:80"):
        with pytest.raises(ConfigError, match="--open"):
            check_bind(bind, Keys(), False)
    for bind in ("8000", "localhost", ":80", "localhost:99999", "a:b"):
        with pytest.raises(ConfigError, match="--bind is"):
            check_bind(bind, Keys(), True)
