"use strict";
// One websocket for the whole page, one chat at a time over it; what was said so far goes along with each question.
const $ = (id) => document.getElementById(id);
const said = [];
let socket = null;
let open = null; // the chat that runs: {id, shown, note, text, asked, first, tokens}
let count = 0;

function state(text) {
  $("state").textContent = text;
}

function idle() {
  open = null;
  $("stop").disabled = true;
  $("send").disabled = !(socket && socket.readyState === WebSocket.OPEN && $("model").value);
}

function bubble(kind, text) {
  const article = document.createElement("article");
  article.className = kind;
  const shown = article.appendChild(document.createElement("p"));
  shown.textContent = text;
  const note = article.appendChild(document.createElement("footer"));
  $("talk").append(article);
  return { article, shown, note };
}

async function enter(event) {
  event.preventDefault();
  if (socket) socket.close();
  const key = $("key").value.trim();
  const answer = await fetch("/v1/models", { headers: { Authorization: `Bearer ${key}` } });
  const told = await answer.json();
  if (!answer.ok) {
    state(told.error.message);
    return;
  }
  $("model").replaceChildren(...told.data.map((model) => new Option(model.id)));
  $("model").disabled = false;
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  socket = new WebSocket(`${scheme}://${location.host}/v1/chat/ws`, ["lorafleet.chat", `key.${key}`]);
  socket.onopen = () => { state("connected"); idle(); };
  socket.onclose = (closed) => { state(`closed (${closed.code}) ${closed.reason}`); fail("the connection closed"); idle(); };
  socket.onmessage = (message) => heard(JSON.parse(message.data));
}

function ask(event) {
  event.preventDefault();
  if (open || $("send").disabled) return;
  const text = $("text").value;
  said.push({ role: "user", content: text });
  bubble("mine", text);
  $("text").value = "";
  count += 1;
  open = { id: `chat-${count}`, text: "", asked: performance.now(), first: null, tokens: 0, about: "", ...bubble("theirs", "") };
  const request = { model: $("model").value, messages: said, max_tokens: Number($("most").value) };
  socket.send(JSON.stringify({ type: "chat", id: open.id, request }));
  $("send").disabled = true;
  $("stop").disabled = false;
  open.note.textContent = "waiting";
}

function heard(told) {
  if (!open || told.id !== open.id) return;
  if (told.type === "started") {
    open.about = `${told.adapter === "none" ? "base model" : told.adapter} · tier ${told.tier ?? "unknown"}`;
  } else if (told.type === "chunk") {
    const choice = told.chunk.choices[0];
    if (choice && choice.delta.content) {
      open.first ??= performance.now();
      open.text += choice.delta.content;
      open.shown.textContent = open.text;
      $("talk").scrollTop = $("talk").scrollHeight;
    }
    note(choice ? choice.finish_reason : null);
  } else if (told.type === "error") {
    fail(told.error.message);
  } else {
    note(told.type === "cancelled" ? "stopped" : null);
    said.push({ role: "assistant", content: open.text });
    idle();
  }
}

function note(end) {
  const first = open.first === null ? "" : ` · first token ${Math.round(open.first - open.asked)} ms`;
  if (end) open.end = ` · ${end}`;
  open.note.textContent = open.about + first + (open.end ?? "");
}

function fail(why) {
  if (!open) return;
  open.article.classList.add("failed");
  const error = open.article.appendChild(document.createElement("p"));
  error.className = "error";
  error.textContent = why;
  said.pop();
  idle();
}

$("door").addEventListener("submit", (event) => enter(event).catch((error) => state(String(error))));
$("ask").addEventListener("submit", ask);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) ask(event);
});
$("stop").addEventListener("click", () => open && socket.send(JSON.stringify({ type: "cancel", id: open.id })));
