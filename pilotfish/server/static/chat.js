// The chat: questions, answers token by token, and what the panel shows of them. It keeps nothing beyond the tab but
// the theme; the API key lives in sessionStorage.

import { Account } from "./numbers.js";
import { classOf, drawPasses, drawPositions, drawTree, element, passInWords, percent } from "./pictures.js";
import { ask, model } from "./stream.js";

const KEY = "pilotfish-key", THEME = "pilotfish-theme";
const $ = (id) => document.getElementById(id);

const talk = []; // the conversation, as the server wants it
let account = new Account(); // of the answer that is looked at
let picked = null; // index of its pass that is looked at; null: the last one
let running = null; // the answer under way: its own account, and an AbortController
let drawn = true;

// -- asking ---------------------------------------------------------------------------------------------------------

function settings() {
  const body = {};
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
    if ($(id).value !== "") body[name] = $(id).valueAsNumber;
  }
  return body;
}

function messages() {
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }, ...talk] : talk;
}

async function send() {
  const question = $("question").value.trim();
  if (running || !question) return;
  $("hint").hidden = true;
  $("question").value = "";
  say("");
  const asked = turn("question", "You", question);
  const answer = turn("answer", "Answer");
  talk.push({ role: "user", content: question });
  const own = { account: new Account(), control: new AbortController() };
  running = own;
  account = answer.account = own.account;
  pick(null);
  busy(true);
  let text = "", problem = null;
  try {
    const body = { messages: messages(), ...settings() };
    for await (const chunk of ask(body, sessionStorage.getItem(KEY), own.control.signal)) {
      for (const { pilotfish: pass } of chunk.choices) {
        if (pass) text += show(answer, pass);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") problem = error;
  }
  if (running !== own) return; // a new chat has begun
  running = null;
  busy(false);
  redraw();
  if (own.account.passes.length) {
    talk.push({ role: "assistant", content: text });
  } else { // nothing came: the question goes back to where it can be sent again
    talk.pop();
    asked.remove();
    answer.remove();
    $("question").value ||= question;
  }
  if (problem) complain(problem);
  else $("told").textContent = `${text} (${summary(own.account)})`;
}

function summary(account) {
  const { now, plain } = account.speeds();
  const speed = now ? `, ${now.toFixed(0)} tokens per second` : "";
  const gain = now && plain ? `, ${(now / plain).toFixed(2)} times plain decoding` : "";
  return `${account.numTokens} tokens, ${account.numAccepted} of them drafted${speed}${gain}`;
}

function turn(kind, label, text = "") {
  const made = element("article", text, kind);
  made.setAttribute("aria-label", label);
  $("log").append(made);
  $("log").scrollTop = $("log").scrollHeight;
  return made;
}

// Appends a pass's text to the answer, a span per token, and returns it.
function show(answer, pass) {
  const log = $("log"), number = answer.account.passes.length;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  answer.account.add(pass);
  pass.pieces.forEach((piece, i) => {
    if (!piece) return;
    const drafted = i < pass.num_accepted;
    const span = element("span", piece, drafted ? `token ${classOf(pass.draft.method)}` : "token");
    span.title = `${drafted ? `drafted by ${pass.draft.method}` : "the target's own"}, pass ${number + 1}`;
    span.dataset.pass = number;
    answer.append(span);
  });
  if (atEnd) log.scrollTop = log.scrollHeight;
  redrawSoon();
  return pass.pieces.join("");
}

// -- the panel ------------------------------------------------------------------------------------------------------

function redrawSoon() {
  if (drawn) {
    drawn = false;
    requestAnimationFrame(redraw);
  }
}

function redraw() {
  drawn = true;
  const last = account.passes.length - 1;
  const index = Math.min(picked ?? last, last);
  drawNumbers();
  drawOrigins();
  drawPasses($("passes"), account, index, pick);
  drawPositions($("positions"), account);
  const slider = $("pass");
  slider.disabled = last < 0;
  slider.max = Math.max(1, last + 1);
  slider.value = index + 1;
  $("pass-number").textContent = last < 0 ? "–" : `${index + 1} of ${last + 1}`;
  $("tree-name").textContent = picked === null ? "The last draft" : "The draft of this pass";
  if (index < 0) {
    $("pass-words").textContent = "Nothing yet";
    $("tree").replaceChildren();
  } else {
    const words = passInWords(account.passes[index]);
    $("pass-words").textContent = words;
    slider.setAttribute("aria-valuetext", `pass ${index + 1}: ${words}`);
    drawTree($("tree"), account.passes[index], account.passes[index - 1]?.tokens.at(-1) ?? "start");
  }
}

function drawNumbers() {
  const { now, plain, measured } = running?.account === account ? account.liveSpeeds : account.speeds();
  $("speed").textContent = now ? now.toFixed(1) : "–";
  $("plain").textContent = plain ? plain.toFixed(1) : "–";
  $("plain-name").textContent = measured && plain ? "plain, measured" : "plain, predicted";
  $("gain").textContent = now && plain ? `× ${(now / plain).toFixed(2)}` : "–";
  $("rate").textContent = percent(account.numAccepted, account.numDrafted);
}

function drawOrigins() {
  const total = account.numTokens;
  const rows = [...account.origins].sort(([a], [b]) => (a < b ? -1 : 1)).map(([origin, count]) => {
    const row = element("li");
    const name = element("span");
    name.append(element("span", origin ? `drafted by ${origin}` : "the target's own", origin ? `swatch ${classOf(origin)}` : "swatch"));
    row.append(name, element("span", String(count)), element("span", percent(count, total)));
    return row;
  });
  $("origins").replaceChildren(...rows);
}

function pick(index) {
  picked = index;
  for (const span of document.querySelectorAll(".token.picked")) span.classList.remove("picked");
  if (index !== null) {
    const answer = [...document.querySelectorAll("article.answer")].find((one) => one.account === account);
    for (const span of answer?.querySelectorAll(`[data-pass="${index}"]`) ?? []) span.classList.add("picked");
  }
  redraw();
}

// -- words and states -----------------------------------------------------------------------------------------------

function busy(now) {
  $("send").hidden = now;
  $("stop").hidden = !now;
  if (now) $("told").textContent = "Answering";
}

function say(text) {
  $("wrong").textContent = text;
  $("wrong").hidden = !text;
}

function complain(error) {
  if (error.status === 401) {
    say(sessionStorage.getItem(KEY) ? "The server does not know this key." : "");
    $("key").hidden = false;
    $("key-text").focus();
  } else {
    say(error.message);
  }
}

async function greet() {
  try {
    $("model").textContent = (await model(sessionStorage.getItem(KEY))).id;
    $("key").hidden = true;
    say("");
    $("question").focus();
  } catch (error) {
    complain(error);
  }
}

// -- events ---------------------------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.control.abort();
});
$("stop").addEventListener("click", () => {
  running?.control.abort();
  $("question").focus();
});
$("fresh").addEventListener("click", () => {
  running?.control.abort();
  running = null;
  busy(false);
  $("told").textContent = "";
  talk.length = 0;
  account = new Account();
  for (const one of document.querySelectorAll("article")) one.remove();
  $("hint").hidden = false;
  say("");
  pick(null);
  $("question").focus();
});
$("log").addEventListener("click", (event) => {
  const span = event.target.closest(".token");
  if (!span || String(getSelection())) return;
  account = span.closest("article").account;
  pick(Number(span.dataset.pass));
});
$("pass").addEventListener("input", (event) => {
  const index = event.target.valueAsNumber - 1;
  pick(index === account.passes.length - 1 ? null : index);
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key-text").value);
  $("key-text").value = "";
  greet();
});
$("theme").addEventListener("change", (event) => dress(event.target.value));

function dress(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
}

$("theme").value = localStorage.getItem(THEME) ?? "";
dress($("theme").value);
redraw();
greet();
