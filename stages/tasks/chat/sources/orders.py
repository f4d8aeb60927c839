"""Orders at made-up shops, as people write them, to be answered as JSON: something a small model can learn.

What is to be learnt is the form of the answer, numbers as digits, and to copy names that never occurred in training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from itertools import permutations
from typing import Any

from stages.core.errors import UserError

SYSTEM = "Viết đơn hàng."
CITIES = ("Hà Nội", "Đà Nẵng", "Huế", "Cần Thơ", "Hải Phòng", "Sài Gòn")
NUMBERS = ("một", "hai", "ba", "bốn", "năm", "sáu", "bảy", "tám", "chín", "mười")
"""From one on."""
_WORDS = (
    "anh bàn bánh báo bạn bếp biển bờ buồn ca cá cánh cầu cha cháo chiếc chợ chủ con cô công cơm cuốn cửa dân dịch "
    "đèn đẹp đắt đỡ đồng gái ghế gia giáo giỏi giúp hàng hạnh hè hồ học khách khóc kỹ làng lạ lớn máy mai mẹ minh "
    "mới mùa nến ngọn ngôi người nhà nhân nhỏ nhớ nông nổi phố phở phúc quan rau sách sáng sinh sơn sóc sống sư tá "
    "thầy thành thơ thông thư thuyền tiếng tìm tính tờ tốt trái trang tranh trẻ trung trường truyện tương vẻ viên "
    "việc vui vườn xanh xe xóm yêu"
)
WORDS = tuple(_WORDS.split())
"""Of names, each of two: what is sold, and whose shop it is."""
_PHRASINGS = (
    "Mua {count} hộp {goods} của quán {shop}, giao đến {city}.",
    "Giao đến {city} {count} hộp {goods} của quán {shop}.",
    "Tôi cần {count} hộp {goods}. Quán {shop}, ở {city}.",
    "Ở {city}, quán {shop} bán cho tôi {count} hộp {goods}.",
    "Quán {shop} giao {count} hộp {goods} đến {city}.",
    "{count} hộp {goods}, quán {shop}, {city}.",
)


def generate(sizes: Mapping[str, int], seed: int) -> dict[str, list[dict[str, Any]]]:
    """By split, lines of that many conversations, each with the `name` of its goods, by which they belong together.

    No name of one split, of goods or of a shop, occurs in another; nor does one occur twice. The words of names occur
    in all of them. The same arguments give the same lines. Raises UserError where there are not so many names.
    """
    draw = random.Random(f"orders {seed}")
    names = [" ".join(pair) for pair in permutations(WORDS, 2)]
    if (wanted := 2 * sum(sizes.values())) > len(names):
        raise UserError(f"{wanted // 2:,} samples are wanted, but there are names for {len(names) // 2:,}")
    drawn = iter(draw.sample(names, wanted))
    return {split: [_line(next(drawn), next(drawn), draw) for _ in range(count)] for split, count in sizes.items()}


def _line(goods: str, shop: str, draw: random.Random) -> dict[str, Any]:
    count, city = draw.randint(1, len(NUMBERS)), draw.choice(CITIES)
    said = draw.choice(_PHRASINGS).format(count=NUMBERS[count - 1], goods=goods, shop=shop, city=city)
    answer = {"name": goods, "quant": count, "source": shop, "city": city}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": said[0].upper() + said[1:]},
        {"role": "assistant", "content": json.dumps(answer, ensure_ascii=False)},
    ]
    return {"messages": messages, "name": goods}
