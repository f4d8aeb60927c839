import pytest

from stages.data.names import composed, similar_name


def test_letters_of_two_characters_equal_those_of_one() -> None:
    assert composed("a\u0309nh.jpg") == composed("\u1ea3nh.jpg")


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("ly.jpg", ["cup.jpg", "Ly.JPG"], " (did you mean 'Ly.JPG'?)"),
        ("my%20cup.jpg", ["my cup.jpg"], " (did you mean 'my cup.jpg'?)"),
        ("a/ly.jpg", ["a/ly.heic"], " (did you mean 'a/ly.heic'?)"),
        ("photo_1.jpg", ["photo_11.jpg"], " (did you mean 'photo_11.jpg'?)"),
        ("..", ["a.jpg"], ""),
        ("ly.jpg", ["spoon.png"], ""),
    ],
)
def test_the_similar_name_is_shown(name: str, known: list[str], expected: str) -> None:
    assert similar_name(name, known) == expected
