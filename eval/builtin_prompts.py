"""The evaluation's own prompts, for a first run without any data: code, math and chat."""

from __future__ import annotations

CODE = (
    "Write a Python class `Stopwatch` with start, stop and reset methods and an `elapsed` property.",
    "Write a Python function that merges overlapping intervals given as (start, end) tuples.",
    "Write a Python generator that yields the lines of a large log file which contain a given word.",
    "Write a Python function `roman(n)` that turns an integer between 1 and 3999 into a Roman numeral.",
    "Write a Python context manager that changes the working directory and restores it afterwards.",
    "Write a Python decorator that retries a function three times when it raises an exception.",
    "Write a Python function that runs a breadth-first search on a graph given as a dict of neighbours.",
    "Write a Python class for a bank account that refuses withdrawals larger than the balance.",
    "Write a Python function that formats a number of bytes as a string such as '1.5 MiB'.",
    "Write a SQL query that lists each customer with the number and the total value of their orders.",
    "Write a JavaScript function that debounces another function by a number of milliseconds.",
    "Write unit tests with pytest for a function `slugify(title)` that makes URL slugs.",
    "Write a Python function that solves a 9x9 sudoku by backtracking.",
    "Rewrite this with a list comprehension:\n\nresult = []\nfor row in rows:\n    if row['price'] > 10:\n"
    "        result.append(row['name'].upper())\n",
    "Find the bug and fix it:\n\ndef mean(values):\n    total = 0\n    for v in values:\n        total = v\n"
    "    return total / len(values)\n",
    "Add type hints and a docstring:\n\ndef chunks(items, size):\n    for i in range(0, len(items), size):\n"
    "        yield items[i:i + size]\n",
    "Write a shell script that renames all .jpeg files of a folder to .jpg and prints how many it renamed.",
    "Write a Python dataclass `Point3D` with a method for the distance to another point.",
    "Write a Python function that evaluates an arithmetic expression in reverse Polish notation.",
    "Write a C function that counts the set bits of an unsigned 32-bit integer.",
)

MATH = (
    "A train leaves at 14:35 and arrives at 17:10. How many minutes does the journey take? Show the steps.",
    "A garden is 12 m long and 7.5 m wide. A fence costs 18 euros per metre. What does the whole fence cost?",
    "A recipe for 4 people needs 300 g of rice. How much rice do 11 people need?",
    "A phone costs 640 euros. Its price falls by 15 percent and then by another 10 percent. What is it now?",
    "Three friends share 93 marbles in the ratio 2 : 3 : 4 and throw away the remainder. Who gets what?",
    "Solve 5x - 7 = 2x + 20 for x and check the result.",
    "Solve the system x + y = 14 and 2x - y = 4.",
    "A tank holds 900 litres. One pipe fills 25 litres a minute, a leak loses 5. When is it full?",
    "What is the sum of the whole numbers from 1 to 250? Explain the formula.",
    "A car drives 210 km at 70 km/h and 180 km at 90 km/h. What is its average speed?",
    "How many different four-digit codes can be made from the digits 1 to 6 without repetition?",
    "Two dice are thrown. What is the probability that the sum is 8?",
    "The angles of a triangle are in the ratio 1 : 2 : 3. Find them.",
    "Compute the compound interest on 2,000 euros at 4 percent a year after 3 years.",
    "Factor x^2 - 5x - 24 and find its roots.",
    "A shop sells pens at 1.20 and notebooks at 3.50. Nora pays 19.60 for 14 items. How many of each?",
    "Find the greatest common divisor of 252 and 198 with Euclid's algorithm.",
    "Convert 3 hours, 47 minutes and 20 seconds into seconds.",
    "A square has the same area as a rectangle of 9 cm by 16 cm. What is the side of the square?",
    "A worker paints a room in 6 hours, another in 4 hours. How long do they need together?",
)

CHAT = (
    "Explain in simple words why the sky is blue.",
    "Write a polite email that moves a dentist appointment to next week.",
    "What should I think about before I adopt a cat?",
    "Give me a packing list for a weekend of hiking in autumn.",
    "Explain the difference between weather and climate.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How does a bicycle stay upright?",
    "Suggest five dinners that can be cooked in twenty minutes.",
    "Write a thank-you note to a neighbour who watered my plants.",
    "Summarise the advantages and disadvantages of working from home.",
    "How can I learn the names of thirty new colleagues?",
    "Describe what happens when water freezes.",
    "Plan a birthday party for a seven-year-old who likes dinosaurs.",
    "Explain what inflation is to a teenager.",
    "What is the history of the printing press, in a few paragraphs?",
    "Write a poem of eight lines about the first snow.",
    "How do I remove a coffee stain from a white shirt?",
    "Give me advice for my first job interview.",
    "Compare a novel and a play as ways to tell a story.",
    "What makes a good night's sleep, and how do I get one?",
)

BUILTIN = {"code": CODE, "math": MATH, "chat": CHAT}
