"""Write gold replies, which follow all instructions of a prompt and do not answer its question.

The gate's self-test and the audit use them to verify that an instruction can be followed and that its checker
accepts it. An edit changes a draft until the checker passes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from strop.tasks.instructions.checkers import MIN_WORDS, Constraint, nearest
from strop.tasks.instructions.google import CHOICES, count_capital_words, count_text, find_word
from strop.tasks.instructions.segments import sentences, strip_marks

_NUM_ROUNDS = 3
_NUM_SHUFFLES = 8
_END_MARKS = ".!?…。！？"
FILLER = (
    "We can walk to the market in the morning and buy fresh bread for the whole family.",
    "The old river runs behind the houses and the children like to play there.",
    "My sister took a long train to the coast and found a quiet room near the water.",
    "They cook together every evening and tell each other about the day.",
    "Small gardens need patience and a little rain to grow well.",
)
"""Sentences without commas, capital words or digits."""
_DRAFTS = (" ".join(FILLER[:2]), FILLER[4], "We go home. You stay here.")
SPOKEN = {
    "ar": "نذهب كل صباح إلى السوق ونشتري الخبز الطازج للعائلة كلها ثم نعود إلى البيت.",
    "bg": "Всяка сутрин ходим на пазара и купуваме пресен хляб за цялото семейство.",
    "bn": "আমরা প্রতিদিন সকালে বাজারে যাই এবং পুরো পরিবারের জন্য তাজা রুটি কিনি।",
    "de": "Wir gehen jeden Morgen auf den Markt und kaufen frisches Brot für die ganze Familie.",
    "en": FILLER[0],
    "es": "Todas las mañanas vamos al mercado y compramos pan fresco para toda la familia.",
    "fa": "ما هر روز صبح به بازار می‌رویم و برای همه خانواده نان تازه می‌خریم.",
    "fi": "Me kävelemme joka aamu torille ja ostamme tuoretta leipää koko perheelle.",
    "fr": "Nous allons chaque matin au marché et nous achetons du pain frais pour toute la famille.",
    "gu": "અમે દરરોજ સવારે બજારમાં જઈએ છીએ અને આખા પરિવાર માટે તાજી રોટલી ખરીદીએ છીએ.",
    "he": "אנחנו הולכים כל בוקר לשוק וקונים לחם טרי לכל המשפחה.",
    "hi": "हम हर सुबह बाज़ार जाते हैं और पूरे परिवार के लिए ताज़ी रोटी ख़रीदते हैं।",
    "it": "Ogni mattina andiamo al mercato e compriamo il pane fresco per tutta la famiglia.",
    "ja": "私たちは毎朝市場へ行って、家族のために新しいパンを買います。",
    "kn": "ನಾವು ಪ್ರತಿದಿನ ಬೆಳಿಗ್ಗೆ ಮಾರುಕಟ್ಟೆಗೆ ಹೋಗಿ ಇಡೀ ಕುಟುಂಬಕ್ಕೆ ತಾಜಾ ರೊಟ್ಟಿ ಖರೀದಿಸುತ್ತೇವೆ.",
    "ko": "우리는 매일 아침 시장에 가서 온 가족을 위해 신선한 빵을 삽니다.",
    "ml": "ഞങ്ങൾ എല്ലാ ദിവസവും രാവിലെ ചന്തയിൽ പോയി കുടുംബത്തിനായി പുതിയ റൊട്ടി വാങ്ങുന്നു.",
    "mr": "आम्ही रोज सकाळी बाजारात जातो आणि संपूर्ण कुटुंबासाठी ताजी भाकरी विकत घेतो आहोत.",
    "ne": "हामी हरेक बिहान बजार जान्छौं र सबै परिवारका लागि ताजा रोटी किन्छौं।",
    "pa": "ਅਸੀਂ ਹਰ ਸਵੇਰ ਬਾਜ਼ਾਰ ਜਾਂਦੇ ਹਾਂ ਅਤੇ ਪੂਰੇ ਪਰਿਵਾਰ ਲਈ ਤਾਜ਼ੀ ਰੋਟੀ ਖਰੀਦਦੇ ਹਾਂ।",
    "pl": "Każdego ranka idziemy na targ i kupujemy świeży chleb dla całej rodziny.",
    "pt": "Todas as manhãs nós vamos ao mercado e compramos pão fresco para a família inteira.",
    "ru": "Каждое утро мы ходим на рынок и покупаем свежий хлеб для всей семьи.",
    "sw": "Kila asubuhi tunakwenda sokoni na kununua mkate mpya kwa ajili ya familia yote.",
    "ta": "நாங்கள் ஒவ்வொரு காலையும் சந்தைக்குச் சென்று குடும்பத்திற்குப் புதிய ரொட்டி வாங்குகிறோம்.",
    "te": "మేము ప్రతి ఉదయం సంతకు వెళ్లి కుటుంబం అందరికీ తాజా రొట్టె కొంటాము.",
    "th": "เราไปตลาดทุกเช้าและซื้อขนมปังสดใหม่ให้ทุกคนในครอบครัว.",
    "uk": "Щоранку ми ходимо на ринок і купуємо свіжий хліб для всієї родини.",
    "ur": "ہم ہر صبح بازار جاتے ہیں اور پورے خاندان کے لیے تازہ روٹی خریدتے ہیں۔",
    "vi": "Mỗi buổi sáng chúng tôi đi chợ và mua bánh mì tươi cho cả gia đình.",
}
"""About going to the market, by ISO 639-1 code."""


def write_replies(constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """Return a reply that follows all instructions, or none if the edits find none.

    Edits run in the order of their table, and again if a later one undid an earlier one; then in shuffled
    orders, which are the same for equal instructions.
    """
    staged = sorted(constraints, key=lambda constraint: _STAGES[constraint.instruction_id])
    shuffler = random.Random(0)
    orders = [staged, *(shuffler.sample(staged, len(staged)) for _ in range(_NUM_SHUFFLES))]
    for order in orders if len(staged) > 1 else orders[:1]:
        for draft in _DRAFTS:
            for _ in range(_NUM_ROUNDS):
                for constraint in order:
                    draft = draft if constraint.is_met(draft) else improve(constraint, draft)
                if all(constraint.is_met(draft) for constraint in order):
                    return (draft,)
    return ()


def improve(constraint: Constraint, draft: str) -> str:
    """Apply an instruction's edit to a draft."""
    return EDITS[constraint.instruction_id](draft, **constraint.arguments)


def _fill(draft: str, num_sentences: int) -> list[str]:
    """Return that many sentences of the draft, repeated if it has fewer, so that it keeps its language."""
    sources = sentences(draft) or list(FILLER)
    return [sources[index % len(sources)] for index in range(num_sentences)]


def _deal(draft: str, num_pieces: int) -> list[str]:
    """Cut a draft into that many pieces of whole sentences, repeated if it has fewer."""
    filled = _fill(draft, max(num_pieces, len(sentences(draft))))
    share, rest = divmod(len(filled), max(num_pieces, 1))
    ends = [0]
    for index in range(num_pieces):
        ends.append(ends[-1] + share + (index < rest))
    return [" ".join(filled[start:end]) for start, end in pairwise(ends)]


def _lengthen(draft: str, num_words: int) -> str:
    """Repeat the sentences of a draft until it has at least that many words between white space."""
    pieces, count = [draft], len(draft.split())
    sources = sentences(draft) or list(FILLER)
    while count < num_words:
        pieces.append(sources[(len(pieces) - 1) % len(sources)])
        count += len(pieces[-1].split())
    return " ".join(pieces)


def _fit_words(draft: str, num_words: int, relation: str) -> str:
    if relation in ("at least", "more than"):
        return _lengthen(draft, num_words + (relation == "more than"))
    if relation in ("exactly", "around"):
        return " ".join(_lengthen(draft, num_words).split()[:num_words])
    # Other edits may add words: one in five stays free for them.
    most = num_words - (relation == "less than")
    return " ".join(draft.split()[: max(1, min(most, max(MIN_WORDS, num_words * 4 // 5)))])


def _add(draft: str, words: Sequence[str], times: int = 1) -> str:
    return " ".join([draft, *(word.strip() for word in words for _ in range(times))]).strip()


def _remove(draft: str, keyword: str, *, is_word: bool = False) -> str:
    """Remove a text from a draft, in any case."""
    edges = (r"(?<!\w)", r"(?!\w)") if is_word else ("", "")
    return re.sub(re.escape(keyword.strip() or keyword).join(edges), "", draft, flags=re.IGNORECASE)


def _remove_words(draft: str, forbidden_words: Sequence[str]) -> str:
    for word in forbidden_words:
        draft = _remove(draft, word, is_word=True)
    return draft


def _fit(draft: str, text: str, count: int, relation: str, bound: int, glue: str = " ") -> str:
    """Let a text that occurs `count` times occur as often as it must."""
    target = nearest(count, relation, bound)
    if target < count:
        draft, count = _remove(draft, text), 0
    return (draft + " " + glue.join([text.strip() or text] * (target - count))).strip()


def _fit_letters(draft: str, N: int, relation: str) -> str:
    missing = N - sum(map(str.isalpha, draft))
    return _add(draft, ["yes"], -(-missing // 3)) if relation == "at least" else draft[: N - 1]


def _open_paragraph(draft: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> str:
    pieces = _deal(draft, num_paragraphs)
    if nth_paragraph <= len(pieces):
        pieces[nth_paragraph - 1] = f"{first_word.strip()} {pieces[nth_paragraph - 1]}"
    return "\n\n".join(pieces)


def _write_capital_words(draft: str, capital_frequency: int, capital_relation: str) -> str:
    count = count_capital_words(draft)
    target = nearest(count, capital_relation, capital_frequency)
    if target < count:
        draft, count = draft.lower(), 0
    return f"{_add('', ['YES'], target - count)} {draft}".strip()


def _place_word(draft: str, keyword: str, n: int, m: int) -> str:
    """Replace the m-th word of the n-th sentence of a draft."""
    missing = n - len(sentences(draft))
    if missing > 0:
        draft = " ".join([draft, *_fill(draft, missing)])
    parts = sentences(draft)
    if n > len(parts):  # The draft does not end in a mark.
        return draft
    words = parts[n - 1].rstrip(_END_MARKS).split()
    words += ["indeed"] * (m - len(words))
    words[m - 1] = keyword.strip()
    # In place, so that line breaks between sentences stay.
    before, _, after = draft.partition(parts[n - 1])
    return f"{before}{' '.join(words)}.{after}"


def _repeat_phrase(_: str, phrase: str, small_n: int) -> str:
    words = phrase.split()
    return "\n".join(" ".join([*words[:1], FILLER[0].split()[n % 5], *words[2:]]) for n in range(small_n))


def _compose_paragraphs(_: str, n_sent: int, n_words: int) -> str:
    words = " ".join(FILLER).replace(".", "").lower().split()
    sentence = " ".join(words[index % len(words)] for index in range(n_words)) + "."
    return "\n* * *\n".join([" ".join([sentence] * n_sent)] * 3)


def _keep_unique_words(draft: str) -> str:
    by_word = {strip_marks(token).lower(): token for token in reversed(draft.split())}
    return " ".join(reversed(by_word.values()))


def _increment_words(draft: str, keyword1: str, keyword2: str) -> str:
    return _add(_remove_words(draft, [keyword1, keyword2]) or _DRAFTS[0], [keyword1, keyword2, keyword2])


def _wrap_bigrams(draft: str) -> str:
    words = draft.split()
    return " ".join(f"<<{' '.join(words[n : n + 2])}>>" for n in range(0, len(words), 2))


# In an order in which later edits do not undo earlier ones.
EDITS: Mapping[str, Callable[..., str]] = {
    # The whole reply.
    "validate_choice": lambda _, options: options[0],
    "copy:repeat_phrase": _repeat_phrase,
    "copy:copy": lambda _, prompt_to_repeat: prompt_to_repeat,
    "copy:copying_simple": lambda _, prompt_to_repeat: prompt_to_repeat,
    "copy:copying_multiple": lambda _, prompt_to_repeat, N: "\n******\n".join([prompt_to_repeat] * N),
    "new:copy_span_idx": lambda _, prompt_to_repeat, n_start, n_end: prompt_to_repeat[n_start : n_end + 1],
    "keywords:no_adjacent_consecutive": lambda _: "We walk to the market every morning.",
    "count:counting_composition": _compose_paragraphs,
    # Language and length.
    "language:response_language": lambda draft, language: str(SPOKEN.get(language, draft)),
    "length_constraints:number_sentences": lambda draft, num_sentences, relation: " ".join(
        _fill(draft, nearest(len(sentences(draft)), relation, num_sentences))
    ),
    "length_constraints:number_words": _fit_words,
    "letters:letter_counting": _fit_letters,
    # Structure.
    "length_constraints:number_paragraphs": lambda draft, num_paragraphs: "\n***\n".join(
        _deal(draft, num_paragraphs)
    ),
    "length_constraints:nth_paragraph_first_word": _open_paragraph,
    # Short bullets, from the draft's words: other instructions may limit words or the language.
    "detectable_format:number_bullet_lists": lambda draft, num_bullets: "\n".join(
        [draft, *([f"* {' '.join(draft.split()[:2])}"] * num_bullets)]
    ),
    "detectable_format:multiple_sections": lambda draft, section_spliter, num_sections: "\n".join(
        f"{section_spliter.strip()} {number}\n{piece}"
        for number, piece in enumerate(_deal(draft, num_sections), 1)
    ),
    "combination:two_responses": lambda draft: f"{draft}\n******\n{FILLER[2]}",
    "paragraphs:paragraphs": lambda draft, num_parts=2: "\n* * *\n".join(_deal(draft, num_parts)),
    "paragraphs:paragraphs2": lambda draft: "\n\n".join(_deal(draft, 2)),
    # Content.
    "keywords:existence": lambda draft, keywords: _add(
        draft, [keyword for keyword in keywords if not count_text(draft, keyword)]
    ),
    "keywords:frequency": lambda draft, keyword, frequency, relation: _fit(
        draft, keyword, count_text(draft, keyword.strip()), relation, frequency
    ),
    "keywords:letter_frequency": lambda draft, letter, let_frequency, let_relation: _fit(
        draft, letter, draft.lower().count(letter.strip().lower() or letter), let_relation, let_frequency, ""
    ),
    "detectable_content:number_placeholders": lambda draft, num_placeholders: _add(
        draft, ["[name]"], num_placeholders
    ),
    "detectable_format:constrained_response": lambda _: CHOICES[0],
    "detectable_format:number_highlighted_sections": lambda draft, num_highlights: _add(
        draft, ["*good point*"], num_highlights
    ),
    "keywords:word_once": lambda draft, keyword: _add(draft, [keyword]),
    "keywords:word_count_different_numbers": lambda draft, keyword, frequency, relation="exactly": _fit(
        draft, keyword, len(find_word(draft, keyword)), relation, frequency
    ),
    "keywords:palindrome": lambda draft: f"{draft} level",
    "keywords:keyword_specific_position": _place_word,
    "count:count_increment_word": _increment_words,
    # What must not be there, and case.
    "keywords:forbidden_words": _remove_words,
    "punctuation:no_comma": lambda draft: draft.replace(",", ""),
    "keywords:exclude_word_harder": _remove,
    "punctuation:punctuation_dot": lambda draft: draft.replace(".", "?"),
    "punctuation:punctuation_exclamation": lambda draft: draft.replace("!", "?"),
    "change_case:capital_word_frequency": _write_capital_words,
    "change_case:english_capital": str.upper,
    "change_case:english_lowercase": str.lower,
    "count:lowercase_counting": lambda draft, N: draft.upper(),
    "count:count_unique": _keep_unique_words,
    # Both ends.
    "detectable_content:postscript": lambda draft, postscript_marker: (
        f"{draft}\n{postscript_marker.strip()} See you soon"
    ),
    "detectable_format:title": lambda draft: f"<<good morning>>\n{draft}",
    "combination:repeat_prompt": lambda draft, prompt_to_repeat: f"{prompt_to_repeat.strip()}\n{draft}",
    "startend:end_checker": lambda draft, end_phrase: f"{draft.rstrip()} {end_phrase.strip()}",
    "detectable_format:sentence_hyphens": lambda draft: "-".join(_fill(draft, max(2, len(sentences(draft))))),
    "keywords:start_end": lambda draft, keyword: f"{keyword.strip()} {draft} {keyword.strip()}",
    "first_word:first_word_sent": lambda draft, first_word: " ".join(
        f"{first_word.strip()} {sentence}" for sentence in sentences(draft)
    ),
    "last_word:last_word_sent": lambda draft, last_word: " ".join(
        f"{sentence.rstrip(_END_MARKS)} {last_word.strip()}." for sentence in sentences(draft)
    ),
    "first_word:first_word_answer": lambda draft, first_word: f"{first_word.strip()} {draft}",
    "last_word:last_word_answer": lambda draft, last_word: f"{draft} {last_word.strip()}",
    # Around the whole.
    "detectable_format:json_format": lambda draft: json.dumps({"reply": draft}, ensure_ascii=False),
    "startend:quotation": lambda draft: f'"{draft}"',
    "detectable_format:square_brackets": lambda draft: " ".join(f"[{word}]" for word in draft.split()),
    "detectable_format:bigram_wrapping": _wrap_bigrams,
}
EDITS = {**EDITS, "letters:letter_counting2": EDITS["keywords:letter_frequency"]}
_STAGES = {instruction_id: stage for stage, instruction_id in enumerate(EDITS)}
