// Search results: pages for users come before single names of the API, then pages about the code and the changelog.
// `score` is called for each result; the other numbers are Sphinx's own.
const LAST = /^(decisions\/|architecture|walks|developing|contributing|changelog)/;
const BY_KIND = { title: 30, object: -20 };  // a heading with the words first
var Scorer = {
  score: ([page, , , , score, , kind]) => score + (BY_KIND[kind] ?? 0) - (LAST.test(page) ? 1000 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
