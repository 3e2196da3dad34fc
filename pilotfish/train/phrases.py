"""Words that prompts begin with or are put together from, by language and by kind. Nothing but lists.

Openings are the first words of a user's message, which the target itself goes on with. An instruction has a place for
the text it is about.
"""

OPENINGS = {
    "en": (
        "What is", "What are the", "Why do", "Why is", "How do I", "How does", "How can I", "Can you explain",
        "Could you", "Explain", "Tell me about", "Give me", "List", "Compare", "Describe", "Suggest", "I want to",
        "I need", "My", "Is it", "Should I", "Please", "Help me", "Which", "What would happen if", "Do you think",
        "In what way", "Discuss",
    ),
    "de": (
        "Was ist", "Warum", "Wie kann ich", "Erkläre", "Nenne", "Welche", "Kannst du", "Ich möchte", "Beschreibe",
        "Wo", "Gibt es", "Schreibe",
    ),
    "fr": ("Qu'est-ce que", "Pourquoi", "Comment", "Expliquez", "Quels sont", "Peux-tu", "Je voudrais", "Décris"),
    "es": ("¿Qué es", "¿Por qué", "¿Cómo", "Explica", "¿Cuáles son", "¿Puedes", "Quiero", "Describe"),
    "it": ("Che cos'è", "Perché", "Come", "Spiega", "Quali sono", "Vorrei"),
    "pt": ("O que é", "Por que", "Como", "Explique", "Quais são", "Quero"),
}  # fmt: skip

FACTS = (
    "Who was", "Who wrote", "Who invented", "Who is the", "When did", "When was", "Where is", "Where did",
    "Which country", "What year", "What is the name of", "What is the capital", "How many", "How long does",
    "How old", "How much", "What does the word", "What was the first", "Which animal", "In which", "who played",
    "what is the meaning of", "where does", "when is", "how far is",
)  # fmt: skip

TASKS = (
    "Write a short story about", "Write an email to", "Write a letter", "Write a poem", "Write a speech",
    "Write a review of", "Write a dialogue between", "Write a blog post about", "Draft a", "Compose",
    "Create a plan for", "Make a list of", "Pretend that you are", "You are a", "Act as", "Imagine that you",
    "Take the role of", "Come up with", "Give feedback on", "Classify", "Sort",
    "Correct the mistakes in this sentence:", "Rephrase this sentence:", "Evaluate", "Argue for", "Think of",
    "Design", "Outline", "Recommend",
)  # fmt: skip

CODE = (
    "Write a Python function that", "Write a Python program that", "Write a function in JavaScript that",
    "Write a C++ program", "Write a class in Python", "Write a SQL query that", "Write a shell script",
    "Implement", "Explain what this code does:\n\n", "Write a regular expression that", "How do I in Python",
    "Write HTML and CSS for", "Find the error in this code:\n\n",
)  # fmt: skip

SCIENCE = (
    "In physics, what", "In chemistry, how", "In biology, why", "What is the function of",
    "What is the history of", "How did the", "What were the causes of", "What is the difference between",
    "Calculate the", "Solve the equation", "Find the value of x", "If f(x) =", "What is the probability",
    "A triangle has", "Prove that",
)  # fmt: skip

NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hiro", "Ida", "Jonas", "Karim", "Lena", "Marco",
    "Nina", "Omar", "Paula", "Ravi", "Sofia", "Tom", "Vera", "A farmer", "A baker", "A shop", "A school",
    "A train", "A factory", "The library", "A teacher", "A gardener", "A driver",
)  # fmt: skip
DEEDS = (
    "has", "buys", "sells", "makes", "needs", "gives away", "collects", "saves", "pays for", "carries", "plants",
    "reads", "earns", "spends", "produces", "drives", "bakes", "packs",
)  # fmt: skip
ASKS = (
    "How many are left?", "How many is that in total?", "How much does it cost altogether?",
    "How long does it take?",
)  # fmt: skip

FORMS = (
    "a news report", "a newspaper article", "an encyclopedia article", "a report for a magazine", "a short essay",
    "a travel report", "a description for a museum", "a biography of someone who worked with",
    "an account of an accident with", "a press release", "a chapter of a textbook", "a report about a court case",
    "a sports report", "a city council's notice", "an interview", "a story", "a history of a town known for",
)  # fmt: skip

LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese", "en": "English"}
# Words by which a paragraph's language is told; frequent, and in no other of these languages.
MARKS = {
    "en": ("the", "of", "and", "is", "that", "with", "was"),
    "de": ("der", "und", "ist", "nicht", "das", "mit", "eine"),
    "fr": ("les", "est", "dans", "pour", "une", "qui", "sur"),
    "es": ("los", "las", "del", "por", "con", "una", "como"),
    "it": ("che", "della", "sono", "gli", "con", "nel", "alla"),
    "pt": ("não", "uma", "dos", "são", "pelo", "com", "mais"),
}

TRANSLATE = (
    "Translate from {source} to {target}: {text}",
    "Translate this {source} text into {target}.\n\n{text}",
    "{text}\n\nWhat does this mean in {target}?",
    "Please give the {target} translation of the following {source} sentences: {text}",
    "What would one say in {target} for this?\n{text}",
)

SUMMARISE = (
    "Summarise this text in a few sentences.\n\n{text}",
    "Write a summary of the following article.\n\n{text}",
    "{text}\n\nWhat are the main points?",
    "Give a short summary: {text}",
    "Sum up this report for somebody in a hurry:\n{text}",
    "{text}\n\nTL;DR",
    "Text: {text}\n\nSummarise the text above.",
)

EDIT = (
    "Rewrite this text in simpler words.\n\n{text}",
    "Rewrite the following in the past tense and change nothing else.\n\n{text}",
    "Correct the spelling and repeat the text.\n\n{text}",
    "Turn this text into bullet points.\n\n{text}",
    "List all names and numbers in this text.\n\n{text}",
    "Extract the facts from this text as JSON.\n\n{text}",
    "Which places and dates are mentioned here?\n\n{text}",
    "Give this text a title and say who it is for.\n\n{text}",
    "Make this text more formal.\n\n{text}",
    "Repeat this text and put the most important words in capitals.\n\n{text}",
    "Continue this text.\n\n{text}",
)

READ = (
    "{text}\n\n{question}",
    "Read this and answer the question.\n\n{text}\n\nQuestion: {question}",
    "Answer from the text alone. {question}\n\nText: {text}",
)
RETRIEVE = (
    "Here are some passages.\n\n{text}\n\nAnswer with their help: {question}",
    "Use these documents to answer.\n{text}\nQuestion: {question}",
    "{question}\n\nThese search results may help:\n{text}",
    "Context:\n{text}\n\n{question}",
)
