"""The words of the grammar. A word is written as its concept; in a sentence its underscores are spaces."""

from __future__ import annotations

from collections.abc import Iterable

PRONOUNS = ("tôi", "anh", "chị", "em", "ông", "bà", "họ", "nó", "chúng_tôi", "mọi_người")
PEOPLE = (
    *("bác_sĩ", "giáo_viên", "nông_dân", "công_nhân", "học_sinh", "kỹ_sư", "chủ_tịch", "nhà_báo", "ca_sĩ", "y_tá"),
    *("cậu_bé", "cô_gái", "bạn", "mẹ", "cha", "hàng_xóm", "khách", "thầy_giáo", "nhân_viên", "ngư_dân"),
)
FOOD = ("cơm", "cá", "bánh", "thịt", "trái_cây", "rau", "cháo", "phở")
TEXTS = ("sách", "thư", "báo", "truyện", "hợp_đồng", "hồ_sơ", "bài_thơ", "báo_cáo")
THINGS = ("xe", "nhà", "ghế", "bàn", "cửa", "thuyền", "máy_tính", "đồng_hồ", "xe_đạp", "trang_trại")
LAMPS = ("đèn", "nến", "bếp")
TOPICS = ("công_việc", "gia_đình", "thời_tiết", "chính_sách", "cuộc_sống", "chiến_tranh", "tương_lai", "giá_cả")
PLACES = ("trường", "chợ", "làng", "thành_phố", "bệnh_viện", "nhà_máy", "vườn", "thư_viện", "bờ_biển", "cánh_đồng")
CLASSIFIERS = {
    "sách": "quyển",
    "truyện": "cuốn",
    "thư": "bức",
    "báo": "tờ",
    "cá": "con",
    "bánh": "chiếc",
    "xe": "chiếc",
    "nhà": "ngôi",
    "ghế": "cái",
    "bàn": "cái",
    "cửa": "cánh",
    "thuyền": "con",
    "đồng_hồ": "chiếc",
    "đèn": "ngọn",
    "nến": "cây",
    "hợp_đồng": "bản",
    "báo_cáo": "bản",
}
QUALITIES = ("lớn", "nhỏ", "cũ", "mới", "đẹp", "đắt", "quan_trọng", "lạ", "tốt", "xanh")
TEMPERS = ("vui", "buồn", "mệt_mỏi", "trẻ", "thông_minh", "nổi_tiếng", "lười_biếng", "trung_thành", "hạnh_phúc", "giỏi")
DEGREES = ("rất", "hơi", "khá", "quá")
POINTERS = ("này", "ấy", "kia")
MANNERS = ("chậm_rãi", "cẩn_thận", "nhanh_chóng", "vui_vẻ", "lặng_lẽ")
TENSES = ("đã", "đang", "sẽ")
MODALITIES = ("phải", "nên", "có_thể", "cần")
TIMES = {
    "hôm_qua": "hôm_qua",
    "hôm_nay": "hôm_nay",
    "ngày_mai": "ngày_mai",
    "buổi_sáng": "buổi_sáng",
    "năm_ngoái": "năm_ngoái",
    "hiện_nay": "now",
    "bây_giờ": "now",
    "mùa_hè": "mùa_hè",
}
"""By their words; some concepts are not those of ViSemPar's own language."""
UNITS = ("ngày", "tháng", "năm", "giờ", "phút")
NUMBERS = {
    "hai": 2,
    "ba": 3,
    "bốn": 4,
    "năm": 5,
    "sáu": 6,
    "bảy": 7,
    "tám": 8,
    "chín": 9,
    "mười": 10,
    "hai mươi": 20,
    "ba mươi": 30,
    "một trăm": 100,
}
FAMILY_NAMES = ("Nguyễn", "Trần", "Lê", "Phạm", "Bùi", "Đặng")
MIDDLE_NAMES = ("Văn", "Thị", "Minh", "Ngọc")
GIVEN_NAMES = ("Lan", "Hải", "Dũng", "Hương", "Nam", "Linh", "Sơn", "Mai")
CITIES = ("Hà Nội", "Đà Nẵng", "Huế", "Cần Thơ", "Hải Phòng", "Sài Gòn")
COUNTRIES = ("Việt Nam", "Lào", "Nhật Bản", "Pháp")

TRANSITIVE = (
    (("ăn", "nấu", "mua", "bán"), "patient", FOOD),
    (("đọc", "viết", "mượn", "dịch"), "theme", TEXTS),
    (("sửa", "sơn", "bán", "cất_giữ", "mua"), "patient", THINGS),
    (("thắp", "tắt"), "patient", LAMPS),
)
"""Verbs, the role of what they act on, and what that may be. The subject is the :agent."""
FEELING = ("nhớ", "yêu_mến", "tin_tưởng", "sợ")
"""The subject is the :pivot."""
MEETING = ("gặp", "tìm", "chờ", "giúp_đỡ", "chăm_sóc")
MOVING = ("đi", "đến", "trở_về")
SPEAKING = ("nói", "hỏi", "kể")
RESTING = ("ngủ", "nghỉ_ngơi", "làm_việc", "khóc", "cười")
WISHES = {"muốn": "pivot", "định": "pivot", "thích": "pivot", "cố_gắng": "agent", "hứa": "agent", "quyết_định": "agent"}
"""Verbs whose subject is also the agent of what follows, with their own role for it."""
ORDERS = ("mời", "khuyên", "nhờ", "yêu_cầu")
"""Verbs whose object is the agent of what follows."""


def vocabulary() -> list[str]:
    """Every word of the grammar with underscores between its syllables, names left out."""
    groups: list[Iterable[str]] = [
        *(PRONOUNS, PEOPLE, FOOD, TEXTS, THINGS, LAMPS, TOPICS, PLACES, CLASSIFIERS.values(), QUALITIES, TEMPERS),
        *(DEGREES, POINTERS, MANNERS, TENSES, MODALITIES, TIMES, UNITS, FEELING, MEETING, MOVING, SPEAKING, RESTING),
        *(WISHES, ORDERS, *(verbs for verbs, _, _ in TRANSITIVE)),
    ]
    return sorted({word for group in groups for word in group})
