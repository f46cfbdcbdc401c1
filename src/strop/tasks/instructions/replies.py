"""Judge replies strictly and loosely, and write gold replies that follow all instructions.

Gold replies do not answer the question; the gate's self-test and the audit use them to verify that an
instruction can be followed and that its checker accepts it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from strop.tasks.answers import text_after_thinking
from strop.tasks.instructions.checkers import Constraint, has_substance
from strop.tasks.instructions.segments import sentences

_ANSWER_TAGS = ("<answer>", "</answer>")
_NUM_ROUNDS = 3
_NUM_SHUFFLES = 8


def judged_text(reply: str) -> str | None:
    """Return the text behind the reasoning, or None if the reasoning has no end."""
    text = text_after_thinking(reply)
    # White space behind the reasoning is not part of the reply.
    return text if text is None or text == reply else text.lstrip()


def without_answer_tags(text: str) -> str:
    """Remove <answer> and </answer>, which some prompts ask for."""
    for tag in _ANSWER_TAGS:
        text = text.replace(tag, "")
    return text.strip()


def is_echo(text: str, prompt: str) -> bool:
    """Whether a reply repeats the whole prompt and adds almost nothing."""
    reply, question = " ".join(text.split()), " ".join(prompt.split())
    return reply.startswith(question) and not has_substance(reply[len(question) :])


def write_replies(constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """Return a reply that follows all instructions, or none if the edits find none.

    Edits run in the order of their stages, and again if a later one undid an earlier one; then in shuffled
    orders, which are the same for equal instructions.
    """
    staged = sorted(constraints, key=lambda constraint: constraint.stage)
    shuffler = random.Random(0)
    orders = [staged, *(shuffler.sample(staged, len(staged)) for _ in range(_NUM_SHUFFLES))]
    for order in orders if len(staged) > 1 else orders[:1]:
        for draft in _DRAFTS:
            reply = _edit(order, draft)
            if reply is not None:
                return (reply,)
    return ()


def _edit(order: Sequence[Constraint], draft: str) -> str | None:
    for _ in range(_NUM_ROUNDS):
        for constraint in order:
            if not constraint.is_met(draft):
                draft = constraint.improve(draft)
        if all(constraint.is_met(draft) for constraint in order):
            return draft
    return None


# Material for gold replies.

FILLER = (
    "We can walk to the market in the morning and buy fresh bread for the whole family.",
    "The old river runs behind the houses and the children like to play there.",
    "My sister took a long train to the coast and found a quiet room near the water.",
    "They cook together every evening and tell each other about the day.",
    "Small gardens need patience and a little rain to grow well.",
)
"""Sentences without commas, capital words or digits."""
BASE_DRAFT = " ".join(FILLER[:2])
_DRAFTS = (BASE_DRAFT, FILLER[4], "We go home. You stay here.")
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


def fill_sentences(draft: str, num_sentences: int) -> list[str]:
    """Return that many sentences of the draft, repeated if it has fewer.

    So a draft keeps its language and its words. An empty one is filled from `FILLER`.
    """
    sources = sentences(draft) or list(FILLER)
    return [sources[index % len(sources)] for index in range(num_sentences)]


def deal(draft: str, num_pieces: int) -> list[str]:
    """Cut a draft into that many pieces of whole sentences, repeated if it has fewer."""
    filled = fill_sentences(draft, max(num_pieces, len(sentences(draft))))
    share, rest = divmod(len(filled), max(num_pieces, 1))
    pieces: list[str] = []
    start = 0
    for index in range(num_pieces):
        end = start + share + (index < rest)
        pieces.append(" ".join(filled[start:end]))
        start = end
    return pieces


def lengthen(draft: str, num_words: int) -> str:
    """Repeat the sentences of a draft until it has at least that many words between white space."""
    pieces = [draft]
    count = len(draft.split())
    sources = sentences(draft) or list(FILLER)
    while count < num_words:
        pieces.append(sources[(len(pieces) - 1) % len(sources)])
        count += len(pieces[-1].split())
    return " ".join(pieces)


def repeat_words(words: Sequence[str], times: int) -> str:
    """Return each word that many times, between spaces."""
    return " ".join(word for word in words for _ in range(times))
