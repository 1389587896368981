//! Parquet files to documents.

use super::DataError;
use super::pages::Checked;
use super::rows::{BadRow, Document, Fields, Row};
use crate::{files, foreign};
use parquet::basic::Repetition;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::file::reader::FileReader;
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most rows that a byte of a file may stand for.
const MOST_ROWS_A_BYTE: u64 = 4;

/// The rows of a Parquet file, only the columns needed being read.
pub struct ParquetRows {
    path: PathBuf,
    rows: RowIter<'static>,
    fields: Fields,
    row: u64,
    /// Rows of the file.
    pub total: u64,
}

impl ParquetRows {
    /// Opens a file.
    pub fn open(path: &Path, fields: &Fields) -> Result<Self, DataError> {
        let refuse = |what: String| DataError::file(path, what);
        let file = files::open(path).map_err(|e| DataError::io(path, e))?;
        let length = file.metadata().map_err(|e| DataError::io(path, e))?.len();
        let reader = foreign::call(|| Checked::new(file).map_err(|e| e.to_string()));
        let reader = reader.flatten().map_err(|e| refuse(format!("not a Parquet file: {e}")))?;
        let metadata = reader.metadata().file_metadata();
        let total = u64::try_from(metadata.num_rows()).unwrap_or(0);
        let columns = metadata.schema().get_fields();
        let wanted = fields
            .prompt
            .iter()
            .chain([&fields.answer])
            .chain(&fields.rejected)
            .map(|name| {
                let column = columns.iter().find(|c| c.name() == name).ok_or_else(|| {
                    let present = columns.iter().map(|c| c.name()).collect::<Vec<_>>().join(", ");
                    refuse(format!("has no column {name:?}; its columns are {present}"))
                })?;
                if column.is_group() || column.get_basic_info().repetition() == Repetition::REPEATED {
                    return Err(refuse(format!("column {name:?} is nested; name one of text")));
                }
                Ok(column.clone())
            })
            .collect::<Result<Vec<Arc<Type>>, _>>()?;
        check(reader.metadata(), length, &wanted).map_err(refuse)?;
        let projection = Type::group_type_builder(metadata.schema().name())
            .with_fields(wanted)
            .build()
            .map_err(|e| refuse(e.to_string()))?;
        let rows = RowIter::from_file_into(Box::new(reader)).project(Some(projection));
        let rows = rows.map_err(|e| refuse(e.to_string()))?;
        Ok(ParquetRows { path: path.to_path_buf(), rows, fields: fields.clone(), row: 0, total })
    }

    /// The next row. A row that cannot be decoded is an error, not a bad row to leave out: the rows
    /// after it cannot be found.
    pub fn read_row(&mut self) -> Result<Option<Row<Vec<Document>>>, DataError> {
        let (path, number) = (&self.path, self.row + 1);
        let damaged = |what: String| {
            DataError::file(path, format!("row {number} cannot be decoded, the file is damaged: {what}"))
        };
        let next = foreign::call(|| self.rows.next()).map_err(damaged)?;
        let Some(row) = next else { return Ok(None) };
        let row = row.map_err(|e| damaged(e.to_string()))?;
        self.row = number;
        let documents = (|| {
            let field = |name: &str| {
                let value = row.get_column_iter().find(|(n, _)| *n == name).map(|(_, v)| v);
                match value {
                    Some(Field::Str(s)) if s.contains('\0') => {
                        Err(format!("column {name:?} contains NUL, which text does not"))
                    }
                    Some(Field::Str(s)) => Ok(s.clone()),
                    Some(Field::Bytes(b)) => {
                        b.as_utf8().map(str::to_string).map_err(|_| format!("column {name:?} is not UTF-8"))
                    }
                    Some(Field::Null) | None => Err(format!("column {name:?} is null")),
                    Some(Field::Group(_) | Field::ListInternal(_) | Field::MapInternal(_)) => {
                        Err(format!("column {name:?} is nested; name one of text"))
                    }
                    Some(number) => foreign::call(|| number.to_string()),
                }
            };
            let prompt = self.fields.prompt.as_deref().map(field).transpose()?;
            let answers = [&self.fields.answer].into_iter().chain(&self.fields.rejected);
            let answers = answers.map(|name| field(name)).collect::<Result<Vec<_>, _>>()?;
            self.fields.of(prompt.as_deref(), &answers)
        })();
        Ok(Some(documents.map_err(|problem| BadRow { line: self.row, problem })))
    }

    /// Rows read so far.
    pub fn read(&self) -> u64 {
        self.row
    }
}

/// Errors in the sizes that a file states. The reader trusts them: it allocates memory for them
/// before it looks at a row.
fn check(metadata: &ParquetMetaData, length: u64, wanted: &[Arc<Type>]) -> Result<(), String> {
    // A row of text has a byte at least, and files are made smaller, but not so: more rows are a
    // few bytes that unfold to hours of work.
    let most = length.saturating_mul(MOST_ROWS_A_BYTE);
    if u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0) > most {
        let rows = metadata.file_metadata().num_rows();
        return Err(format!(
            "has {rows} rows in {length} bytes, which no rows of text are; at most {MOST_ROWS_A_BYTE} a byte are read"
        ));
    }
    let mut rows = 0i64;
    for (i, group) in metadata.row_groups().iter().enumerate() {
        let wrong = |what: String| Err(format!("its row group {} {what}; the file is damaged", i + 1));
        if group.num_rows() < 0 {
            return wrong(format!("has {} rows", group.num_rows()));
        }
        rows = rows.saturating_add(group.num_rows());
        for column in wanted {
            let name = column.name();
            let path = |c: &&ColumnChunkMetaData| c.column_path().parts() == [name];
            let Some(chunk) = group.columns().iter().find(path) else {
                return wrong(format!("lacks the column {name:?}"));
            };
            if chunk.num_values() != group.num_rows() {
                let (has, rows) = (chunk.num_values(), group.num_rows());
                return wrong(format!("has {rows} rows and {has} values of column {name:?}"));
            }
            let begin = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
            let place = u64::try_from(begin).ok().zip(u64::try_from(chunk.compressed_size()).ok());
            let end = place.and_then(|(begin, size)| begin.checked_add(size));
            if end.is_none_or(|end| end > length) || chunk.data_page_offset() < 0 {
                return wrong(format!("says that column {name:?} is beyond the end of the file"));
            }
        }
    }
    if rows != metadata.file_metadata().num_rows() {
        let says = metadata.file_metadata().num_rows();
        return Err(format!("has {rows} rows in its groups and says {says}; the file is damaged"));
    }
    Ok(())
}
